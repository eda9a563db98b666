"""Test the bound for LAMB in the tests on several GPUs: the rounding of sums over ranks, simulated on a CPU."""

from __future__ import annotations

import pytest
import torch
from adaptive_oracle import group, make_problem
from rounded_sums import difference_of_directions, error_of_a_sum, rounding
from torch import Tensor

from common.optim.adaptive import LAMB

ELEMENTS = 1 << 18


def gradients(ranks: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return the gradient of each rank: independent and normal."""
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(ELEMENTS, generator=generator).to(dtype) for _ in range(ranks)]


def exact(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).double().sum(0)


def once(terms: list[Tensor]) -> Tensor:
    """Return the sum of a switch, which rounds once."""
    return exact(terms).to(terms[0].dtype)


def ring(terms: list[Tensor]) -> Tensor:
    """Return the sum of a ring: the piece of rank r starts at rank r + 1, and each further rank rounds it."""
    ranks, length = len(terms), ELEMENTS // len(terms)
    pieces = []
    for rank in range(ranks):
        piece = slice(rank * length, (rank + 1) * length)
        total = terms[(rank + 1) % ranks][piece]
        for hop in range(2, ranks + 1):
            total = total + terms[(rank + hop) % ranks][piece]
        pieces.append(total)
    return torch.cat(pieces)


def nodes(terms: list[Tensor]) -> Tensor:
    """Return the sum inside nodes of two ranks, then over the nodes."""
    pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return pairs[0] if len(pairs) == 1 else pairs[0] + pairs[1]


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_rounds_as_often_as_it_adds(ranks, dtype):
    terms = gradients(ranks, dtype)
    bound = error_of_a_sum(dtype, ranks)
    assert 0.65 * bound < relative(ring(terms), exact(terms)) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_four_ranks_in_two_nodes_round_less_than_a_ring_and_a_switch_only_once(dtype):
    terms = gradients(4, dtype)
    in_ring, in_nodes, in_switch = (relative(way(terms), exact(terms)) for way in (ring, nodes, once))
    assert in_switch < rounding(dtype)
    assert in_switch < in_nodes < in_ring


def test_two_ranks_have_the_same_sum_in_any_order():
    terms = gradients(2)
    assert torch.equal(ring(terms), once(terms))
    assert torch.equal(nodes(terms), once(terms))


def first_direction(gradient: Tensor) -> Tensor:
    """Return the direction of LAMB's first update: weights are zeros, there is no trust ratio, and the rate is -1."""
    problem = make_problem(LAMB(epsilon=1e-30), [torch.zeros(ELEMENTS)], [group()])
    problem.set_gradients([gradient])
    problem.apply(-1.0, 0)
    return problem.part(problem.shard.masters, 0)


@pytest.mark.parametrize("ranks", [4, 8])
def test_rounded_sums_turn_the_signs_that_lambs_first_update_consists_of(ranks):
    terms = gradients(ranks)
    found = relative(first_direction(ring(terms)), first_direction(once(terms)))
    bound = difference_of_directions(torch.bfloat16, ranks)
    assert bound / 3 < found < bound
    assert found > 5 * relative(ring(terms), once(terms))
