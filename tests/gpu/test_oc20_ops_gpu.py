"""Test OpenCatalyst's operations on a GPU: repeatable, and captured with another graph of the same shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.oc20.config import Facts
from benchmarks.oc20.model import OPERATIONS, DimeNetPlusPlus, force_errors
from benchmarks.oc20.ops.triplet_sum import TRIPLET_SUM
from benchmarks.oc20.ops.triplet_sum.cases import CASES
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Draw
from tests.benchmarks.oc20.small_graphs import graph_of, molecule
from tests.gpu.support import GPU, captured

pytestmark = pytest.mark.gpu

CELL = torch.tensor([[5.1, 0.0, 0.0], [0.7, 6.5, 0.0], [0.2, -0.4, 9.0]], dtype=torch.float64)
EDGES = 300


def test_the_same_bits_twice() -> None:
    passes = CASES[0].passes(TRIPLET_SUM.function("triton"), Draw(GPU, torch.float32))
    for each in passes:
        first, second = ([each.run()] if each.name == "forward" else each.run() for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True)), each.name


def graph(seed: int) -> dict[str, Tensor]:
    """Return a structure of 6 atoms, filled up to 9 atoms and :data:`EDGES`."""
    position = molecule(6, seed)
    edges = len(graph_of(position, CELL, (0, 0))["edge_shift"])
    made = graph_of(position, CELL, (3, EDGES - edges))
    return {name: (x.float() if x.is_floating_point() else x).to(GPU) for name, x in made.items()}


def network(name: str) -> DimeNetPlusPlus:
    generator = torch.Generator().manual_seed(1)
    functions = {key: operation.function(name) for key, operation in OPERATIONS.items()}
    model = DimeNetPlusPlus(fixed_facts(Facts, "oc20"), generator, **functions)
    with torch.no_grad():
        for output in model.outputs:
            output.last.weight.normal_(generator=generator)
    return model.to(GPU)


def forces_and_gradients(model: DimeNetPlusPlus, tensors: dict[str, Tensor]) -> list[Tensor]:
    force = model(tensors)
    loss = force_errors(force, tensors["force"], tensors["free"])
    return [force.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_a_captured_pass_with_another_structure_gives_what_the_reference_does() -> None:
    model, static = network("triton"), graph(1)
    recorded, found = captured(lambda: forces_and_gradients(model, static))
    other = graph(2)
    for name, tensor in static.items():
        tensor.copy_(other[name])
    recorded.replay()
    for one, expected in zip(found, forces_and_gradients(network("reference"), other), strict=True):
        assert (one - expected).norm() <= 2e-4 * expected.norm()
