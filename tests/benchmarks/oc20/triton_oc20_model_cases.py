"""OpenCatalyst's kernels in float64 and its network with them; run by tests/test_interpreted_kernels.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.oc20.model import OPERATIONS, DimeNetArchitecture, DimeNetPlusPlus, force_errors
from benchmarks.oc20.ops.edge_basis.reference import edge_basis_reference, spherical_constants, spherical_harmonics
from benchmarks.oc20.ops.edge_basis.triton import edge_basis
from benchmarks.oc20.ops.triplet_sum import triplet_sum_reference
from benchmarks.oc20.ops.triplet_sum.cases import random_edges
from benchmarks.oc20.ops.triplet_sum.triton import triplet_sum
from common.ops.cases import Draw
from tests.benchmarks.oc20.small_graphs import graph_of, molecule

CPU = torch.device("cpu")
SIZES = DimeNetArchitecture(8, 6, 1, 4, 3, 3, 4, 5, 1, 1, 1)
CELL = torch.tensor([[4.1, 0.0, 0.0], [0.7, 6.5, 0.0], [0.2, -0.4, 9.0]], dtype=torch.float64)


def fp64(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def test_the_sum_over_triplets_has_the_values_and_two_derivatives_of_the_reference_in_float64() -> None:
    graph, unit = random_edges(Draw(CPU, torch.float64), atoms=4, pairs=5, single=2)
    harmonics = spherical_harmonics(unit.double(), 3)
    inputs = fp64(len(unit), 2).requires_grad_(), fp64(len(unit), 3, 2).requires_grad_()
    torch.testing.assert_close(triplet_sum(*inputs, harmonics, graph), triplet_sum_reference(*inputs, harmonics, graph))
    assert torch.autograd.gradcheck(lambda *inputs: triplet_sum(*inputs, harmonics, graph), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *inputs: triplet_sum(*inputs, harmonics, graph), inputs, fast_mode=True)


def test_the_basis_functions_have_the_values_and_two_derivatives_of_the_reference_in_float64() -> None:
    x, unit = torch.tensor([0.15, 0.4, 0.99], dtype=torch.float64, requires_grad=True), fp64(3, 3)
    inputs = unit, *spherical_constants(3, 2), 5
    for found, expected in zip(edge_basis(x, *inputs), edge_basis_reference(x, *inputs), strict=True):
        torch.testing.assert_close(found, expected)
    assert torch.autograd.gradcheck(lambda x: edge_basis(x, *inputs)[:2], x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: edge_basis(x, *inputs)[:2], x, fast_mode=True)


def test_a_third_derivative_of_the_basis_functions_is_an_error() -> None:
    x = fp64(2).abs().add(0.1).requires_grad_()
    value, _, _ = edge_basis(x, fp64(2, 3), *spherical_constants(2, 2), 5)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="have two derivatives"):
        torch.autograd.grad(curvature.sum(), x)


def test_directions_that_need_a_gradient_are_an_error() -> None:
    graph, unit = random_edges(Draw(CPU, torch.float32), atoms=3, pairs=2, single=0)
    unit.requires_grad_()
    with pytest.raises(ValueError, match="no derivative by directions; detach them or choose the reference"):
        edge_basis(torch.ones(4), unit, *spherical_constants(2, 2), 5)
    with pytest.raises(ValueError, match="no derivative by directions; detach them or choose the reference"):
        triplet_sum(torch.ones(4, 3), torch.ones(4, 2, 3), spherical_harmonics(unit, 2), graph)


def forces_and_gradients(name: str, padding: tuple[int, int] = (1, 1)) -> dict[str, Tensor]:
    """Return forces of atoms that are not padding, and the gradient of the loss by all parameters, in float64."""
    generator = torch.Generator().manual_seed(1)
    functions: dict[str, Any] = {key: operation.function(name) for key, operation in OPERATIONS.items()}
    model = DimeNetPlusPlus(SIZES, generator, **functions)
    with torch.no_grad():
        for output in model.outputs:
            output.last.weight.normal_(generator=generator)
    graph = graph_of(molecule(2, seed=5), CELL, padding)
    force = model.cast(torch.float64)(graph)
    loss = force_errors(force, graph["force"], graph["free"].double())
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    return {"force": force[:2].detach(), **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("padding", [(1, 1), (3, 7)])
def test_forces_and_gradients_of_the_network_are_those_of_the_reference(padding: tuple[int, int]) -> None:
    found = forces_and_gradients("triton", padding)
    for name, expected in forces_and_gradients("reference").items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")
