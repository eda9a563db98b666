"""Test FLUX.1 on a GPU: the network at its real width against diffusers, its planned memory, and a captured step."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.flux1.architecture import FluxArchitecture
from benchmarks.flux1.config import Facts
from benchmarks.flux1.evaluate import ValidationLoss, with_updates
from benchmarks.flux1.memory import FluxMemory
from benchmarks.flux1.model import OPERATIONS, Flux, parameter_count
from benchmarks.flux1.workload import FluxTraining
from common.config import loading
from common.config.composition import compose
from common.contract.evaluation import Weights
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.ops.operation import REFERENCE
from common.step.graphs import StepRunner
from tests.benchmarks.flux1.public_names import diffusers_network, positions, to_diffusers
from tests.gpu.support import GPU, WITH_FP8, OnDevice, relative_error, waiting_is_an_error

pytestmark = pytest.mark.gpu

FACTS = fixed_facts(Facts, "flux1")
SAMPLES = 4
LINEAR = pytest.mark.parametrize("linear", ["reference", pytest.param("fp8", marks=WITH_FP8)])


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Turn off TF32, and free the memory after each test."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    gc.collect()
    torch.cuda.empty_cache()


def of_depth(double_blocks: int, single_blocks: int) -> FluxArchitecture:
    return dataclasses.replace(FACTS, double_blocks=double_blocks, single_blocks=single_blocks)


def generator_of(name: str) -> torch.Generator:
    return torch.Generator(GPU).manual_seed(sum(name.encode()))


def flux(
    shape: FluxArchitecture, dtype: torch.dtype, recomputed: tuple[int, int] = (0, 0), **implementations: str
) -> Flux:
    """Return the network with random weights, of which none is zero but the biases.

    Args:
        recomputed: blocks that recompute everything, and further ones that recompute all but their products.
    """
    return Flux(
        shape, implementations, generator_of, GPU, dtype, recomputed_blocks=recomputed[0],
        recomputed_operations=recomputed[1], zero_std=0.02,
    )  # fmt: skip


def inputs(shape: FluxArchitecture, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(GPU).manual_seed(2)
    sizes = (shape.image_length, shape.packed), (shape.text_length, shape.text_width), (shape.caption_width,)
    normal = [torch.randn(SAMPLES, *size, generator=generator, device=GPU).to(dtype) for size in sizes]
    return normal[0], normal[1], normal[2], torch.rand(SAMPLES, generator=generator, device=GPU)


def test_the_real_width_in_fp32_equals_diffusers() -> None:
    shape = of_depth(1, 2)
    ours, theirs = flux(shape, torch.float32), diffusers_network(shape).to(GPU)
    theirs.load_state_dict(to_diffusers(dict(ours.named_parameters()), shape))
    x, text, caption, t = inputs(shape, torch.float32)
    text_ids, image_ids = (ids.to(GPU) for ids in positions(shape))
    wanted = theirs(
        hidden_states=x, encoder_hidden_states=text, pooled_projections=caption, timestep=t, img_ids=image_ids,
        txt_ids=text_ids,
    ).sample  # fmt: skip
    found = ours(x, text, caption, t)
    for prediction in (found, wanted):
        prediction.square().mean().backward()
    assert relative_error(found, wanted) < 1e-4
    gradients = to_diffusers({name: parameter.grad for name, parameter in ours.named_parameters()}, shape)
    for name, parameter in theirs.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < 2e-3, name


@pytest.mark.parametrize("recomputed", [(0, 0), (2, 1)])
@LINEAR
def test_fast_operations_follow_fp32(linear: str, recomputed: tuple[int, int]) -> None:
    shape = of_depth(1, 2)
    ours = flux(shape, torch.bfloat16, recomputed, linear=linear)
    exact = flux(shape, torch.float32, **dict.fromkeys(OPERATIONS, REFERENCE))
    exact.load_state_dict({name: tensor.float() for name, tensor in ours.named_parameters()})
    given = inputs(shape, torch.bfloat16)
    for _ in range(2):  # the second use has the scales of the first
        ours.zero_grad()
        found = ours(*given)
        found.float().square().mean().backward()
    wanted = exact(*(x.float() for x in given))
    wanted.square().mean().backward()
    of_output, of_gradients = (0.02, 0.06) if linear == "reference" else (0.1, 0.3)
    assert relative_error(found, wanted) < of_output
    gradients = [
        torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()]) for model in (ours, exact)
    ]
    assert relative_error(*gradients) < of_gradients


@pytest.mark.parametrize(
    ("double_blocks", "single_blocks", "recomputed"), [(3, 1, (0, 0)), (1, 4, (0, 0)), (3, 1, (3, 0)), (2, 2, (0, 4))]
)
@LINEAR
def test_blocks_keep_the_planned_bytes(
    double_blocks: int, single_blocks: int, recomputed: tuple[int, int], linear: str
) -> None:
    shape = of_depth(double_blocks, single_blocks)
    model, given = flux(shape, torch.bfloat16, recomputed, linear=linear), inputs(shape, torch.bfloat16)
    planned = FluxMemory(
        architecture=shape, samples=SAMPLES, micro_batches=1, eval_samples=SAMPLES, parameters=parameter_count(shape),
        itemsize=2, master_bytes=4, shards=1, fp8=linear == "fp8", asked=recomputed,
    ).kept(0)  # fmt: skip
    model(*given).sum().backward()  # gradients, FP8 weights and libraries' workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = model(*given)
    kept = torch.cuda.memory_allocated() - before - result.nbytes
    assert 0.97 * planned < kept < 1.05 * planned


def built(*overrides: str) -> FluxTraining:
    run, _ = loading.load(
        compose([
            "benchmark=flux1", "scale=1xH200", "scale.gpus_per_node=1", "micro_batch=8", "hparams.global_batch_size=16",
            "model.double_blocks=1", "model.single_blocks=2", "hparams.warmup_steps=0", *overrides,
        ]),
        lambda _: FluxTraining,
    )  # fmt: skip
    return FluxTraining(run, Layout(run.layout, seed=3, device=GPU))


def batches(workload: FluxTraining, step: int) -> list[Batch]:
    """Return the two micro-batches of a step, whose samples have other numbers in every step."""
    (example,) = workload.example_batches()
    ids = example.tensors["sample_ids"]
    return [Batch({**example.tensors, "sample_ids": ids + 16 * step + first}, 8) for first in (0, 8)]


def test_every_operation_has_a_kernel_by_default() -> None:
    choices = built().choices
    kernels = ("modulated_norm", "gated_residual", "qk_norm_rope", "gelu")
    assert {name: choices[name] for name in kernels} == dict.fromkeys(kernels, "triton")
    assert choices["attention"] != REFERENCE
    assert choices["linear"] == REFERENCE


@LINEAR
def test_a_captured_step_trains_like_an_eager_one(linear: str) -> None:
    """The replays have new noise and times, and the host never waits."""
    losses = []
    for capture in (False, True):
        workload = built(f"model.implementations.linear={linear}", "model.zero_std=0.02")
        step, cfg = workload.build_step(), workload.cfg
        runner = StepRunner(step, workload.model, cfg.grad_accumulation_steps, capture)
        runner.warm_up(workload.example_batches())
        given = [batches(workload, number) for number in range(4)]
        results = []
        torch.cuda.synchronize()
        with runner.on_stream(), waiting_is_an_error():
            for each in given:
                result = runner(each)
                results.append((result.names, result.values.clone()))
        torch.cuda.synchronize()
        assert not runner.uncaptured
        losses.append([step.read(names, values.tolist()).metrics["loss"] for names, values in results])
    eager, replayed = losses
    assert len(set(eager)) == 4
    assert replayed == pytest.approx(eager, rel=0.02)


def test_the_plan_covers_the_measured_memory() -> None:
    """The whole step, with 3 double and 6 single blocks at micro-batch 16."""
    workload = built("model.double_blocks=3", "model.single_blocks=6", "micro_batch=16", "model.zero_std=0.02")
    assert workload.memory is not None
    step = workload.build_step()
    (example,) = workload.example_batches()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step([example])
    taken = torch.cuda.max_memory_allocated()
    parts = dict(workload.memory.parts)
    planned = workload.memory.total - parts["reserved"] - parts["evaluation"]
    assert 0.9 * planned < taken < planned + 1e9


def test_a_captured_evaluation_equals_an_eager_one_and_has_other_noise_after_other_updates() -> None:
    workload, rows = built("model.zero_std=0.02"), torch.arange(9, device=GPU).split(3)
    (example,) = workload.example_batches()
    sets = [
        {
            **{name: tensor[:3].clone() for name, tensor in example.tensors.items()},
            "sample_ids": row, "timesteps": row % FACTS.eval_timesteps, "present": row < FACTS.eval_timesteps,
        }
        for row in rows
    ]  # fmt: skip
    losses = []
    for capture in (False, True):
        evaluation = ValidationLoss(
            workload.model, workload.sample_losses, {name: tensor.clone() for name, tensor in sets[0].items()},
            workload.layout, lambda root: OnDevice(sets, FACTS.eval_timesteps), capture, FACTS.eval_timesteps,
        )  # fmt: skip
        with torch.cuda.stream(torch.cuda.Stream()):  # a capture needs a stream of its own
            evaluation.warm_up()
        torch.cuda.synchronize()
        evaluation.open_data(Path())
        for updates in (0, 5):
            weights = with_updates(Weights(dict(workload.model.named_parameters())), torch.tensor(updates, device=GPU))
            losses.append(evaluation.scorer.score(evaluation.predict(weights))["eval_loss"])
        evaluation.close()
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-4)
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
