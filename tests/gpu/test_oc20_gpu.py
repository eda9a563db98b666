"""Test OpenCatalyst on a GPU: the network against float64, captured steps of several shapes, captured evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.oc20.config import Facts
from benchmarks.oc20.evaluate import evaluation_of
from benchmarks.oc20.model import OPERATIONS, DimeNetPlusPlus, force_errors
from benchmarks.oc20.workload import OpenCatalystForces
from common import cli
from common.config.composition import compose
from common.data.batches import Batch, Block
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation
from common.mlperf.fixed import fixed_facts
from common.step.graphs import StepRunner
from tests.benchmarks.oc20.small_graphs import graph_of, molecule
from tests.gpu.support import GPU, OnDevice, eager_and_captured_scores, relative_error

pytestmark = pytest.mark.gpu

CELL = torch.tensor([[6.1, 0.0, 0.0], [0.7, 6.5, 0.0], [0.2, -0.4, 9.0]], dtype=torch.float64)
ATOMS, EDGES = 16, 1200


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """Add in a fixed order, so that two runs differ by nothing else."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def network(device: str, dtype: torch.dtype, implementation: str = "triton") -> DimeNetPlusPlus:
    """Return the rules' network; its last layers are not 0."""
    generator = torch.Generator().manual_seed(1)
    functions = {name: operation.function(implementation) for name, operation in OPERATIONS.items()}
    model = DimeNetPlusPlus(fixed_facts(Facts, "oc20"), generator, **functions)
    with torch.no_grad():
        for output in model.outputs:
            output.last.weight.normal_(generator=generator)
    return model.cast(dtype).to(device)


def slab(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a structure of 12 atoms, filled up to :data:`ATOMS` and :data:`EDGES`."""
    position = molecule(12, seed)
    edges = len(graph_of(position, CELL, (0, 0))["edge_shift"])
    made = graph_of(position, CELL, (ATOMS - 12, EDGES - edges))
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in made.items()}


def forces_and_gradients(model: DimeNetPlusPlus, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    force_A3 = model(tensors)
    loss = force_errors(force_A3, tensors["force"].to(force_A3.dtype), tensors["free"].to(force_A3.dtype))
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights)
    return {"force": force_A3, **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 0.15)], ids=str)
def test_forces_and_gradients_follow_float64(dtype: torch.dtype, tolerance: float) -> None:
    """On a CPU, the largest errors of PyTorch's own operations are 2e-6 and 0.04. The order of sums differs here."""
    expected = forces_and_gradients(network("cpu", torch.float64, "reference"), slab(1, torch.float64))
    on_gpu = {name: tensor.to(GPU) for name, tensor in slab(1).items()}
    for name, found in forces_and_gradients(network("cuda", dtype), on_gpu).items():
        assert relative_error(found.cpu(), expected[name]) < tolerance, name


def trained(capture: bool, root: Path) -> tuple[list[float], dict[str, Tensor], list[Hashable]]:
    """Train for two epochs. Return losses, changes of the weights, and the shapes of all iterations."""
    run, _ = cli.load(compose(["benchmark=oc20", "scale=test", "precision=fp32"]))
    workload = OpenCatalystForces(run, Layout(run.layout, device=GPU, seed=7))
    runner = StepRunner(workload.build_step(), workload.model, run.grad_accumulation_steps, capture)
    before = {name: weight.detach().clone() for name, weight in workload.model.named_parameters()}
    losses, keys = [], []
    with contextlib.closing(workload.open_data(root)) as source:
        runner.warm_up(workload.examples_of_data())
        batches = [
            Batch({name: tensor.to(GPU) for name, tensor in batch.tensors.items()}, batch.samples, batch.key)
            for batch in source.batches(Block(0, 1, 2, 0, 2 * run.train_samples))
        ]
    for first in range(0, len(batches), run.grad_accumulation_steps):
        together = batches[first : first + run.grad_accumulation_steps]
        with runner.on_stream():
            result = runner(together)
        torch.cuda.synchronize()
        losses.append(runner.step.read(result.names, result.values.tolist()).metrics["loss"])
        keys.append(together[0].key)
    assert runner.uncaptured == {}
    changes = {name: weight.detach() - before[name] for name, weight in workload.model.named_parameters()}
    runner.close()
    return losses, changes, keys


def test_captured_steps_of_several_shapes_train_as_eager_ones(data_of) -> None:
    (losses, changes, keys), (expected_losses, expected_changes, _) = (
        trained(capture, data_of("oc20")) for capture in (True, False)
    )
    assert len(set(keys)) > 1
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, expected in expected_changes.items():
        assert relative_error(changes[name], expected) < 1e-3, name


def test_a_captured_evaluation_gives_what_an_eager_one_does() -> None:
    source = OnDevice([slab(seed) for seed in (1, 2)], 2)

    def made(example: dict[str, Tensor], capture: bool) -> tuple[CountedEvaluation, DimeNetPlusPlus]:
        model = network("cuda", torch.float32)
        return evaluation_of(model, 1.7, example, lambda _: source, Layout(device="cuda"), capture), model

    eager, captured = eager_and_captured_scores(source, made)
    assert eager["eval_samples"] == captured["eval_samples"] == 2
    assert captured["force_mae"] == pytest.approx(eager["force_mae"], rel=1e-5)
