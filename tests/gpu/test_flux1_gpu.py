"""Test FLUX.1 at its real width on a GPU: kernels, gradients against fp32, captured steps and evaluation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.flux1.evaluate import ValidationLoss, with_updates
from benchmarks.flux1.workload import FluxTraining
from common import cli
from common.config.composition import compose
from common.contract.evaluation import Weights
from common.distributed.layout import Layout
from common.step.graphs import StepRunner
from tests.benchmarks.flux1.flux_ranks import batch_of
from tests.gpu.support import GPU, WITH_FP8, OnDevice, relative_error

pytestmark = pytest.mark.gpu

SAMPLES, STEPS = 2, 3
KERNELS = ("modulated_norm", "gated_residual", "qk_norm_rope", "gelu")
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


def built(precision: str, *overrides: str) -> FluxTraining:
    """Return a block of each kind of the real network."""
    run, _ = cli.load(
        compose([
            "benchmark=flux1", "scale=1xH200", f"precision={precision}", "model.double_blocks=1",
            "model.single_blocks=1", "model.zero_std=0.02", f"micro_batch={SAMPLES}",
            f"hparams.global_batch_size={2 * SAMPLES}", "hparams.warmup_steps=0", "reader.eval_batch=3",
            "submission.division=open", *overrides,
        ])
    )  # fmt: skip
    return FluxTraining(run, Layout(run.layout, device=GPU, seed=7))


def test_every_operation_has_a_kernel_by_default() -> None:
    choices = built("bf16").choices
    assert {name: choices[name] for name in KERNELS} == dict.fromkeys(KERNELS, "triton")
    assert choices["attention"] != "reference"
    assert choices["linear"] == "reference"


def gradients(workload: FluxTraining) -> dict[str, Tensor]:
    """Return the gradients of the second of two passes; in FP8 the first finds the scales."""
    for _ in range(2):
        workload.model.zero_grad()
        workload.loss(batch_of(workload, range(SAMPLES))).total.backward()
    return {name: each.grad for name, each in workload.model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("recomputed", [0, 2])
@pytest.mark.parametrize(
    ("linear", "tolerance"), [("reference", 0.04), pytest.param("fp8", 0.25, marks=WITH_FP8)]
)  # fmt: skip
def test_gradients_follow_fp32(linear: str, tolerance: float, recomputed: int) -> None:
    """The references give the expected gradients, from the same bf16 weights."""
    half = built("bf16", f"model.implementations.linear={linear}", f"model.recomputed_blocks={recomputed}")
    wide = built("fp32", *(f"model.implementations.{name}=reference" for name in KERNELS))
    wide.model.load_state_dict({name: each.float() for name, each in half.model.named_parameters()})
    expected, found = gradients(wide), gradients(half)
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], each) for name, each in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < tolerance, (worst, errors[worst])


def trained(workload: FluxTraining, capture: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and changes of the weights."""
    runner = StepRunner(workload.build_step(), workload.model, 2, capture)
    before = {name: weight.detach().clone() for name, weight in workload.model.named_parameters()}
    runner.warm_up(workload.example_batches())
    losses = []
    for iteration in range(STEPS):
        batches = [batch_of(workload, range(first, first + SAMPLES)) for first in (4 * iteration, 4 * iteration + 2)]
        with runner.on_stream():
            result = runner(batches)
        torch.cuda.synchronize()
        losses.append(runner.step.read(result.names, result.values.tolist()).metrics["loss"])
    assert runner.uncaptured == {}
    changes = {name: weight.detach() - before[name] for name, weight in workload.model.named_parameters()}
    runner.close()
    return losses, changes


def test_captured_steps_train_as_eager_ones() -> None:
    (losses, changes), (expected_losses, expected) = (trained(built("fp32"), capture) for capture in (True, False))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, change in expected.items():
        assert change.any(), name
        assert relative_error(changes[name], change) < 1e-2, name  # AdamW divides small gradients by themselves


@LINEAR
def test_captured_steps_in_16_bits_have_the_losses_of_eager_ones(linear: str) -> None:
    (losses, _), (expected, _) = (
        trained(built("bf16", f"model.implementations.linear={linear}"), capture) for capture in (True, False)
    )
    assert losses == pytest.approx(expected, rel=5e-3)


def test_a_captured_evaluation_equals_an_eager_one_and_has_fresh_noise_after_every_update() -> None:
    workload = built("bf16")
    facts, own = workload.own.facts, workload.own.reader.eval_batch
    batches = []
    for position in range(3):  # 8 samples, one at each timestep, and a row that is padding
        rows = torch.arange(position * own, (position + 1) * own)
        tensors = batch_of(workload, rows.tolist()).tensors
        extra = {"timesteps": rows.to(GPU) % facts.eval_timesteps, "present": rows.to(GPU) < facts.eval_timesteps}
        batches.append({**tensors, **extra})
    scores = []
    for capture in (False, True):
        evaluation = ValidationLoss(
            workload.model, workload.sample_losses, {name: x.clone() for name, x in batches[0].items()},
            workload.layout, lambda root: OnDevice(batches, facts.eval_timesteps), capture, facts.eval_timesteps,
        )  # fmt: skip
        with torch.cuda.stream(torch.cuda.Stream()):  # a capture needs a stream of its own
            evaluation.warm_up()
        torch.cuda.synchronize()
        evaluation.open_data(Path())
        found = []
        for updates in (0, 5):
            weights = with_updates(Weights(dict(workload.model.named_parameters())), torch.tensor(updates, device=GPU))
            found.append(evaluation.scorer.score(evaluation.predict(weights))["eval_loss"])
        scores.append(found)
        evaluation.close()
    eager, captured = scores
    assert captured == pytest.approx(eager, rel=1e-4)
    assert eager[0] != pytest.approx(eager[1], rel=1e-4)
