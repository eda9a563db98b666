"""Mask R-CNN's iteration on one GPU: branches change nothing, each combination of shapes has a graph, nothing waits."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once

import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn import iteration
from benchmarks.maskrcnn.workload import MaskRCNNSegmentation
from common import cli
from common.config.composition import compose
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.startup import set_determinism
from common.step.branches import Branch
from common.step.graphs import StepRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PRECISIONS = ["fp32", "bf16", "fp16"]


@pytest.fixture(autouse=True)
def deterministic():
    """Every sum in a fixed order, where PyTorch's are not."""
    set_determinism(True)
    yield
    set_determinism(False)


def built(precision: str, *overrides: str) -> MaskRCNNSegmentation:
    run, _ = cli.load(compose(["benchmark=maskrcnn", "scale=test", f"precision={precision}", *overrides]))
    return MaskRCNNSegmentation(run, Layout(run.layout, device=torch.device("cuda", 0), seed=7))


def weights(workload: MaskRCNNSegmentation) -> dict[str, Tensor]:
    torch.cuda.synchronize()
    return {name: tensor.detach().clone() for name, tensor in workload.named_state()}


def batches(workload: MaskRCNNSegmentation, places: str, seed: int) -> list[Batch]:
    """Micro-batches of other pictures than the examples', of the shapes that ``places`` counts."""
    examples = list(workload.example_batches())
    generator = torch.Generator(device="cuda").manual_seed(seed)
    found = []
    for place in places:
        example = examples[int(place)]
        image = torch.randn(example.tensors["image"].shape, device="cuda", generator=generator)
        image = image.to(workload.dtype, memory_format=torch.channels_last)
        own = {"image": image, "seed": torch.full_like(example.tensors["seed"], seed)}
        found.append(Batch({**example.tensors, **own}, example.samples, example.key))
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_streams_of_branches_change_no_gradient(precision, monkeypatch):
    found = []
    for branch in (Branch, lambda device: Branch(torch.device("cpu"))):  # the latter has no stream of its own
        monkeypatch.setattr(iteration, "Branch", branch)
        workload = built(precision)
        (batch,) = batches(workload, "1", seed=3)
        losses = workload.loss(batch)
        losses.total.backward()
        torch.cuda.synchronize()
        gradients = {n: p.grad.double() for n, p in workload.model.named_parameters() if p.grad is not None}
        found.append((losses.metrics, gradients))
    (metrics, gradients), (expected_metrics, expected) = found
    for name, value in expected_metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-5, atol=1e-6)
    tolerance = 1e-5 if precision == "fp32" else 2e-2  # levels add up in another order
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-12, name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_of_every_combination_of_shapes_changes_the_weights_as_the_eager_iteration(precision):
    runners = []
    for capture in (False, True):
        workload = built(precision)
        runner = StepRunner(workload.build_step(), workload.model, workload.cfg.grad_accumulation_steps, capture)
        runner.warm_up(workload.example_batches())
        runners.append((workload, runner))
    for seed, places in enumerate(("0101", "1000", "1111", "0011")):
        changed = []
        for workload, runner in runners:
            with runner.on_stream():
                runner(batches(workload, places, seed))
            changed.append(weights(workload))
        for name, expected in changed[0].items():
            assert (changed[1][name] - expected).double().norm() <= 1e-4 * expected.double().norm() + 1e-6, name
    (_, eager), (_, captured) = runners
    assert captured.uncaptured == eager.uncaptured == {}
    assert len(captured._captured) == 5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_replay_waits_for_nothing(precision):
    workload = built(precision)
    runner = StepRunner(workload.build_step(), workload.model, workload.cfg.grad_accumulation_steps)
    runner.warm_up(workload.example_batches())
    given = batches(workload, "0101", seed=1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with runner.on_stream():
            result = runner(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert result.values.isfinite().all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_eager_iteration_waits_for_nothing_either(precision):
    workload = built(precision)
    step = workload.build_step()
    given = batches(workload, "0101", seed=1)
    step(given)  # compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
