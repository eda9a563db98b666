"""Test the training of GPT-3 and Llama 3.1 on a GPU.

Gradients follow float64; steps that run as one graph, as graphs of chunks and eagerly agree, and so do evaluations
between them; FP8 learns text as bf16 does (``pytest -s`` prints the losses).
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once

import numpy as np
import pytest
import torch
from torch import Tensor

from common import cli
from common.config.composition import compose
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.ops import weight_gradient
from common.ops.operation import OperationRequest
from common.step.capture import CudaRecorder
from common.step.chunk_graphs import ChunkGraphs
from common.step.graphs import StepRunner
from common.step.train_step import TrainStep
from tests.benchmarks.evaluated_rows import Evaluated, Pretraining
from tests.chunk_passes import Stage
from tests.gpu.support import BF16_AND_FP8, GPU, WITH_FP8, relative_error, waiting_is_an_error

pytestmark = pytest.mark.gpu

LENGTH, VOCABULARY = 384, 512
SHARED = {"hidden": 512, "layers": 3, "heads": 4, "vocabulary": VOCABULARY, "initializer_range": 0.04}
FACTS: dict[str, dict[str, Any]] = {
    "gpt3": {**SHARED, "feed_forward": 2048, "positions": LENGTH},
    "llama31_8b": {
        **SHARED, "kv_heads": 2, "head_size": 128, "feed_forward": 1024, "row_length": LENGTH,
        "rope_original_context": 256,
    },
}  # fmt: skip
"""Dataset constants of small networks, by workload."""

BOUNDS = {"torch": (0.002, 0.06), "fp8": (0.02, 0.4)}
"""Largest relative errors of the loss and of a gradient. With the two mantissa bits of e5m2, they show wrong wiring."""

ATTENTION = "model.implementations.attention=reference"
"""Other implementations add gradients atomically in 16 bits."""

WORKLOADS = pytest.mark.parametrize("name", list(FACTS))


def built(name: str, *overrides: str, **facts: object) -> Pretraining:
    """Return a workload of a small network, always with the same initial weights; ``facts`` replace its constants."""
    given = [f"benchmark.facts.{key}={value}" for key, value in {**FACTS[name], **facts}.items()]
    run, _ = cli.load(compose([f"benchmark={name}", "scale=test", "device=cuda", "precision=bf16", *given, *overrides]))
    workload: Any = cli.workload_class(name)(run, Layout(run.layout, seed=3, device=GPU))
    return workload


def rows(name: str, count: int, seed: int) -> Tensor:
    """Return random rows of tokens; the last token of GPT-3's rows is not scored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(500, (count, LENGTH + 1), generator=generator, dtype=torch.int32)
    if name == "gpt3":
        tokens[:, -1] = -1
    return tokens


def micro_batches(name: str, count: int, seed: int) -> list[Batch]:
    return [Batch({"tokens": part.to(GPU)}, 2) for part in rows(name, 2 * count, seed).split(2)]


def runner_of(workload: Pretraining) -> StepRunner:
    cfg = workload.cfg
    return StepRunner(workload.build_step(), workload.model, cfg.grad_accumulation_steps, cfg.cuda_graphs)


def losses_of(step: TrainStep, runner: StepRunner, steps: Sequence[Sequence[Batch]]) -> list[float]:
    """Return the loss of every step. No step may wait for the device."""
    results = []
    torch.cuda.synchronize()
    with runner.on_stream(), waiting_is_an_error():
        for given in steps:
            result = runner(given)
            results.append((result.names, result.values.clone()))
    torch.cuda.synchronize()
    assert not runner.uncaptured
    return [step.read(names, values.tolist()).metrics["loss"] for names, values in results]


def gradients(workload: Pretraining) -> dict[str, Tensor]:
    named = workload.model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def state_of(workload: Pretraining, step: TrainStep | None = None) -> dict[str, Tensor]:
    """Return copies of all persistent tensors of the workload and of the updaters of ``step``."""
    torch.cuda.synchronize()
    named = dict(workload.named_state())
    for updater in () if step is None else step.updaters:
        named |= dict(updater.named_state())
    return {name: tensor.detach().clone() for name, tensor in named.items()}


# Gradients of Llama 3.1


def llama_loss(workload: Pretraining, seed: int = 1) -> Tensor:
    (batch,) = micro_batches("llama31_8b", 1, seed)
    return workload.loss(batch).total


@BF16_AND_FP8
@pytest.mark.parametrize("recomputed", [0, 3])
def test_gradients_follow_float64(linear: str, recomputed: int) -> None:
    ours = built("llama31_8b", f"model.linear={linear}", f"model.recomputed_gate_up={recomputed}")
    exact = built("llama31_8b", "precision=fp64", "model.blocks=autograd")
    exact.model.load_state_dict({name: p.double() for name, p in ours.model.named_parameters()})
    for _ in range(2):  # the second use has the scale of the first
        ours.model.zero_grad()
        found = llama_loss(ours)
        found.backward()
    expected = llama_loss(exact)
    expected.backward()
    of_loss, of_gradient = BOUNDS[linear]
    torch.testing.assert_close(found.double(), expected, rtol=of_loss, atol=0)
    found_gradients, exact_gradients = gradients(ours), gradients(exact)
    assert found_gradients.keys() == exact_gradients.keys()
    for name, gradient in exact_gradients.items():
        assert relative_error(found_gradients[name], gradient) < of_gradient, name


@BF16_AND_FP8
@pytest.mark.parametrize("blocks", ["handwritten", "autograd"])
def test_captured_gradients_add_up_in_fp32(linear: str, blocks: str) -> None:
    """Gradients of eight micro-batches in fp32 are no farther from float64 than those in bf16."""
    if blocks == "autograd" and linear == "fp8":
        pytest.skip("only hand-written blocks multiply in FP8")
    errors, losses = {}, {}
    given = (f"model.linear={linear}", f"model.blocks={blocks}", "hparams.global_batch_size=16", "micro_batch=2")
    exact = built("llama31_8b", "precision=fp64", "model.blocks=autograd")
    for gradients_in, dtype in (("fp32", torch.float32), ("same", torch.bfloat16)):
        workload = built("llama31_8b", *given, f"optimizer.gradients={gradients_in}")
        start = {name: p.detach().double() for name, p in workload.model.named_parameters()}
        runner = runner_of(workload)
        runner.warm_up(workload.example_batches())
        (losses[gradients_in],) = losses_of(
            runner.step, runner, [[batch for seed in range(8) for batch in micro_batches("llama31_8b", 1, seed)]]
        )
        found = gradients(workload)
        assert {gradient.dtype for gradient in found.values()} == {dtype}
        exact.model.load_state_dict(start)
        exact.model.zero_grad()
        for seed in range(8):
            llama_loss(exact, seed).backward()
        errors[gradients_in] = max(relative_error(found[name], g) for name, g in gradients(exact).items())
        runner.close()
    print(f"{linear}, {blocks}: {errors}")
    assert errors["fp32"] < BOUNDS[linear][1]
    assert errors["fp32"] < 1.05 * errors["same"]
    assert losses["fp32"] == pytest.approx(losses["same"], rel=1e-3)


def trained_llama(*overrides: str, nudged: bool = False) -> tuple[dict[str, Tensor], list[float]]:
    """Return weights and losses of six steps of two micro-batches.

    Args:
        overrides: settings besides the batch and the implementation of attention.
        nudged: change the last bit of ten weights first.
    """
    workload = built("llama31_8b", "hparams.global_batch_size=4", "micro_batch=2", ATTENTION, *overrides)
    if nudged:
        weight = workload.model.get_parameter("layers.0.qkv.weight").detach()
        weight.view(-1)[:10].view(torch.int16).add_(1)
    runner = runner_of(workload)
    runner.warm_up(workload.example_batches())
    losses = losses_of(runner.step, runner, [micro_batches("llama31_8b", 2, seed) for seed in range(6)])
    runner.close()
    return {name: weight.detach().float() for name, weight in workload.model.named_parameters()}, losses


@WITH_FP8
@pytest.mark.parametrize("accumulation", list(weight_gradient.WEIGHT_GRADIENT.fast))
def test_gradients_that_products_add_up_equal_those_that_are_added_afterwards(accumulation: str) -> None:
    """The transposed weights that a step keeps are those of its weights."""
    reason = weight_gradient.WEIGHT_GRADIENT.unsupported(accumulation, OperationRequest(GPU, torch.bfloat16))
    if reason is not None:
        pytest.skip(reason)
    option = "model.implementations.accumulation"
    plain, losses = trained_llama("model.linear=fp8", "cuda_graphs=false", f"{option}=reference")
    other, others = trained_llama("model.linear=fp8", f"{option}={accumulation}", "model.transposed_layers=2")
    assert others == pytest.approx(losses, rel=2e-3)
    for name, weight in plain.items():
        assert relative_error(other[name], weight) < 5e-2, name  # the last bits of some weights cause as much


def test_masters_as_remainders_change_less_than_the_last_bit_of_ten_weights() -> None:
    """Of two equally near bfloat16 the split takes the larger: one weight in some ten thousand at every update.

    Adam makes steps of one size even of the smallest gradients, so that the runs diverge.
    """
    (plain, losses), (other, others), (again, _) = (
        trained_llama("cuda_graphs=false", f"optimizer.masters={masters}", nudged=nudged)
        for masters, nudged in (("fp32", False), ("remainder", False), ("fp32", True))
    )
    assert losses == pytest.approx(others, rel=1e-3)
    for name, weight in plain.items():
        error, noise = relative_error(other[name], weight), relative_error(again[name], weight)
        assert error < noise, f"{name}: {error}, and {noise} between two runs with masters in fp32"


# Graphs of chunks


CUDA_GRAPHS = {"eager": "false", "whole": "true", "chunks": "chunks"}
KINDS = {
    "fp32": (("precision=fp32", "deterministic=true"), 1e-5),
    "bf16": ((), 2e-3),
    "fp8": (("model.linear=fp8", "optimizer.masters=remainder"), 2e-3),
}
"""Settings, and the largest relative difference of losses."""


@pytest.fixture
def in_order() -> Iterator[None]:
    """Compute sums in a fixed order where PyTorch can, without TF32."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = tf32


def built_for_graphs(name: str, kind: str, count: int, graphs: str) -> Pretraining:
    """Return a workload with ``count`` micro-batches; its vocabulary is padded, and its weights move at once."""
    facts = {"warmup_samples": 0, "vocabulary": 500} if name == "gpt3" else {}
    given = (f"hparams.global_batch_size={2 * count}", "micro_batch=2", f"cuda_graphs={CUDA_GRAPHS[graphs]}")
    return built(name, *given, ATTENTION, *KINDS[kind][0], **facts)


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("kind", ["fp32", "bf16", pytest.param("fp8", marks=WITH_FP8)])
@WORKLOADS
def test_graphs_of_chunks_train_as_one_graph_and_as_eager_passes(name: str, kind: str, count: int) -> None:
    losses: dict[str, list[float]] = {}
    changes: dict[str, dict[str, Tensor]] = {}
    for graphs in CUDA_GRAPHS:
        workload = built_for_graphs(name, kind, count, graphs)
        start = {n: parameter.detach().double() for n, parameter in workload.model.named_parameters()}
        runner = runner_of(workload)
        runner.warm_up(workload.example_batches())
        losses[graphs] = losses_of(runner.step, runner, [micro_batches(name, count, seed) for seed in range(3)])
        changes[graphs] = {n: p.detach().double() - start[n] for n, p in workload.model.named_parameters()}
        assert runner.cost.graphs == {"eager": 0, "whole": 1, "chunks": 2}[graphs]
        assert (runner.cost.memory > 0) == (graphs != "eager")
        runner.close()
        del workload, runner
    eager = changes["eager"]
    assert all(moved.norm() > 0 for moved in eager.values())
    for graphs in ("whole", "chunks"):
        assert losses[graphs] == pytest.approx(losses["eager"], rel=KINDS[kind][1]), graphs
        if kind == "fp32":
            off = torch.stack([(changes[graphs][n] - expected).norm() for n, expected in eager.items()]).norm()
            size = torch.stack([expected.norm() for expected in eager.values()]).norm()
            assert off / size < 1e-4, graphs  # Adam amplifies differences of the smallest gradients


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("kind", ["fp32", pytest.param("fp8", marks=WITH_FP8)])
@WORKLOADS
def test_warm_up_by_chunks_leaves_no_trace(name: str, kind: str) -> None:
    workload = built_for_graphs(name, kind, 8, "chunks")
    runner = runner_of(workload)
    before, random = state_of(workload, runner.step), (torch.get_rng_state(), torch.cuda.get_rng_state())
    runner.warm_up(workload.example_batches())
    for key, tensor in state_of(workload, runner.step).items():
        assert torch.equal(tensor, before[key]), key
    assert torch.equal(random[0], torch.get_rng_state())
    assert torch.equal(random[1], torch.cuda.get_rng_state())
    runner.close()


@pytest.mark.usefixtures("in_order")
@WORKLOADS
def test_replays_take_no_more_memory(name: str) -> None:
    workload = built_for_graphs(name, "bf16", 8, "chunks")
    runner = runner_of(workload)
    runner.warm_up(workload.example_batches())
    steps = [micro_batches(name, 8, seed) for seed in range(3)]
    losses_of(runner.step, runner, steps)
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        losses_of(runner.step, runner, steps)
    assert torch.cuda.memory_reserved() == reserved
    runner.close()


def test_graphs_of_chunks_keep_the_tensors_of_many_micro_batches_apart() -> None:
    """Each of two chunks has a graph for every micro-batch that a stage of a pipeline has in flight."""
    device = torch.device("cuda", 0)
    eager, graphs = Stage(device), Stage(device, ChunkGraphs())
    assert graphs.graphs is not None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = eager.run()
        with graphs.graphs.recording(CudaRecorder(stream)):
            graphs.record()
        for repeated in range(2):  # the second round uses all slots again from the start
            found = graphs.run()
            for unit, tensor in expected.items():
                torch.testing.assert_close(found[unit], tensor, rtol=0, atol=1e-11, msg=str(unit))
            for own, one in zip(graphs.gradients(), eager.gradients(), strict=True):
                torch.testing.assert_close(own, one * (repeated + 1), rtol=1e-10, atol=1e-10)
    torch.cuda.synchronize()
    assert graphs.graphs.count > 2 * 8
    graphs.graphs.close()


# Evaluations between steps in FP8


CLOSE = 0.005
"""Largest relative difference of scores in FP8 and bf16."""


def built_for_evaluation(name: str, *overrides: str) -> Pretraining:
    return built(name, "model.linear=fp8", "hparams.global_batch_size=4", ATTENTION, *overrides)


def score_in_bf16(name: str, trained: Pretraining) -> float:
    """Return the score of the trained weights with products in bf16."""
    half = built_for_evaluation(name, "model.linear=torch")
    evaluated = Evaluated(half, rows(name, 6, 77))
    with torch.no_grad():
        for mine, other in zip(half.model.parameters(), trained.model.parameters(), strict=True):
            mine.copy_(other)
    score = evaluated.score()
    evaluated.close()
    return score


def train_and_evaluate(name: str, workload: Pretraining, evaluates: bool) -> tuple[list[float], list[float]]:
    """Return losses of captured steps, and the score after each. An evaluation changes no state."""
    runner = StepRunner(workload.build_step(), workload.model, workload.cfg.grad_accumulation_steps)
    runner.warm_up(workload.example_batches())
    # as in a run: building the step moves the weights to other addresses, and a graph keeps the addresses
    evaluated = Evaluated(workload, rows(name, 6, 77)) if evaluates else None
    losses, scores = [], []
    for seed in range(4):
        losses += losses_of(runner.step, runner, [micro_batches(name, 2, seed)])
        if evaluated is not None:
            before = state_of(workload)
            scores.append(evaluated.score())
            for key, tensor in state_of(workload).items():
                assert torch.equal(tensor, before[key]), key
    runner.close()
    if evaluated is not None:
        evaluated.close()
    return losses, scores


@WITH_FP8
@WORKLOADS
def test_evaluations_in_fp8_are_captured_and_do_not_change_training(name: str) -> None:
    found = {}
    for case, given in {
        "captured": (), "eager": ("cuda_graphs=false",), "chunks": ("cuda_graphs=chunks",),
        "fp32": ("cuda_graphs=chunks", "optimizer.gradients=fp32"),
    }.items():  # fmt: skip
        workload = built_for_evaluation(name, *given)
        found[case] = train_and_evaluate(name, workload, evaluates=True)
        if case == "captured":
            half = score_in_bf16(name, workload)
    alone, _ = train_and_evaluate(name, built_for_evaluation(name), evaluates=False)
    for case, (losses, scores) in found.items():
        print(case, losses, scores)
        assert losses == pytest.approx(alone, rel=2e-3)
    captured = found["captured"][1]
    for case in ("eager", "chunks"):
        assert captured == pytest.approx(found[case][1], rel=1e-3)
    assert captured == pytest.approx(found["fp32"][1], rel=CLOSE)  # other gradients have moved these weights
    assert captured[-1] == pytest.approx(half, rel=CLOSE)
    assert captured[-1] != half, "one of them was not in FP8"
    assert len(set(captured)) == 4, "the graph has the weights of its warm-up"


# FP8 beside bf16 on text


TEXT_FACTS: dict[str, dict[str, Any]] = {
    "gpt3": {"heads": 8, "feed_forward": 4096, "warmup_samples": 320, "decay_samples": 64_000},
    "llama31_8b": {"heads": 8, "kv_heads": 2, "feed_forward": 3584},
}
STEPS, MEAN_OF, ROWS = 200, 20, 16
"""Updates, updates per mean loss, and rows of an update."""


def text() -> np.ndarray:
    """Return the bytes of Python's standard library: far more than are read, so that nothing is learnt by heart."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.concatenate([np.frombuffer(file.read_bytes(), np.uint8) for file in files]).astype(np.int32)


def text_losses(name: str, linear: str) -> list[float]:
    """Train a network of four layers, 1,024 wide, on text; each row is read once. Return means of 20 losses."""
    facts = {"hidden": 1024, "layers": 4, "vocabulary": 256, "initializer_range": 0.02, **TEXT_FACTS[name]}
    warm_up = () if name == "gpt3" else ("hparams.warmup_steps=20",)
    workload = built(
        name, f"model.linear={linear}", f"hparams.global_batch_size={ROWS}", f"micro_batch={ROWS}",
        "hparams.base_learning_rate=5e-4", *warm_up, **facts,
    )  # fmt: skip
    runner = runner_of(workload)
    runner.warm_up(workload.example_batches())
    ids = text()
    starts = np.random.default_rng(1).permutation((len(ids) - 1) // LENGTH)[: STEPS * ROWS] * LENGTH
    tokens = torch.from_numpy(np.stack([ids[start : start + LENGTH + 1] for start in starts])).to(GPU)
    if name == "gpt3":
        tokens[:, -1] = -1
    losses = losses_of(runner.step, runner, [[Batch({"tokens": part}, ROWS)] for part in tokens.split(ROWS)])
    runner.close()
    return np.array(losses).reshape(-1, MEAN_OF).mean(1).tolist()


@WITH_FP8
@WORKLOADS
def test_fp8_learns_text_as_bf16_does(name: str) -> None:
    """Two runs in bf16 from the same weights diverge, because the order of sums differs: FP8 may differ by 1 % more."""
    curves = [text_losses(name, linear) for linear in ("torch", "torch", "fp8")]
    for losses in curves:
        print(" ".join(f"{loss:.4f}" for loss in losses))
    assert curves[0][-1] < 0.7 * curves[0][0]
    for one, other, fp8 in zip(*curves, strict=True):
        middle = (one + other) / 2
        assert abs(fp8 - middle) < 0.01 * middle + abs(one - other)
