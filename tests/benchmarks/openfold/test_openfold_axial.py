"""Test transfers of dynamic axial parallelism: results and gradients on 2 and 4 ranks, and refused sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.openfold.axial import AxialSplit
from common.distributed.layout import Layout
from tests.gloo_ranks import on_ranks, results

SHAPE = (2, 8, 4, 3)
DEGREES = (2, 4)


def whole(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Return a random tensor, the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(x: Tensor, dim: int, rank: int, world: int) -> Tensor:
    """Return a rank's part of a tensor."""
    return x.chunk(world, dim)[rank]


def gradient_of(result: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the sum of ``weight * result``."""
    (gradient,) = torch.autograd.grad((result * weight).sum(), x)
    return gradient


def run_rank(rank: int, world: int, _: str) -> dict[str, Any]:
    """Return results and gradients of every transfer on one rank."""
    split = AxialSplit.from_layout(Layout({"cp": world}, rank))
    found: dict[str, Any] = {"offset": split.offset(8)}
    for dim in (1, 2):
        own = part(whole(1), dim, rank, world).clone().requires_grad_()
        for name, gather in (("gather", split.gather), ("gather_summed", split.gather_summed)):
            y = gather(own, dim)
            weight = whole(2 if name == "gather" else 3 + rank)
            found[f"{name} {dim}"] = y.detach(), gradient_of(y, own, weight)
        x = whole(1).requires_grad_()
        y = split.shard(x, dim)
        found[f"shard {dim}"] = y.detach(), gradient_of(y, x, part(whole(2), dim, rank, world))
        other = 3 - dim
        y = split.transpose(own, dim, other)
        found[f"transpose {dim}"] = y.detach(), gradient_of(y, own, part(whole(2), other, rank, world))
    own = part(whole(1), 1, rank, world).clone().requires_grad_()
    pending = split.start_gather(own, 1, summed=True), split.start_transpose(own, 1, 2)
    between = own * 2.0
    gathered, transposed = (each.wait() for each in pending)
    y = gathered.sum() + (transposed * part(whole(2), 2, rank, world)).sum() + between.sum()
    found["overlapped"] = torch.autograd.grad(y, own)[0]
    with torch.no_grad():
        found["contiguous"] = all(
            each.is_contiguous() for each in (split.gather(own, 2), split.transpose(own, 1, 2), split.shard(own, 2))
        )
    for dim, name in ((0, "shard"), (3, "transpose")):
        with pytest.raises(ValueError, match="3 positions cannot be sharded evenly"):
            split.shard(whole(1, (3, 4)), 0) if name == "shard" else split.transpose(own, 1, dim)
    return found


@pytest.fixture(scope="module", params=DEGREES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each rank, for every degree."""
    folder: Path = tmp_path_factory.mktemp("axial")
    on_ranks(run_rank, request.param, folder)
    return results(request.param, folder)


@pytest.mark.parametrize("dim", [1, 2])
def test_gathered_tensors_are_whole_and_their_gradients_are_those_of_one_loss_or_the_sum(found, dim):
    world = len(found)
    summed = sum(whole(3 + rank) for rank in range(world))
    for rank, of in enumerate(found):
        for name, gradient in (("gather", whole(2)), ("gather_summed", summed)):
            y, own = of[f"{name} {dim}"]
            assert torch.equal(y, whole(1))
            torch.testing.assert_close(own, part(gradient, dim, rank, world), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dim", [1, 2])
def test_a_shard_is_the_own_part_and_every_rank_gets_the_whole_gradient(found, dim):
    for rank, of in enumerate(found):
        y, gradient = of[f"shard {dim}"]
        assert torch.equal(y, part(whole(1), dim, rank, len(found)))
        assert torch.equal(gradient, whole(2))


@pytest.mark.parametrize("dim", [1, 2])
def test_a_transposition_exchanges_the_sharded_axis(found, dim):
    for rank, of in enumerate(found):
        y, gradient = of[f"transpose {dim}"]
        assert torch.equal(y, part(whole(1), 3 - dim, rank, len(found)))
        assert torch.equal(gradient, part(whole(2), dim, rank, len(found)))


def test_transfers_under_way_at_once_give_the_same(found):
    world = len(found)
    for rank, of in enumerate(found):
        torch.testing.assert_close(of["overlapped"], part(whole(2), 1, rank, world) + world + 2.0)


def test_ranks_know_their_offset_and_results_are_contiguous(found):
    assert [of["offset"] for of in found] == [rank * 8 // len(found) for rank in range(len(found))]
    assert all(of["contiguous"] for of in found)


def test_a_single_rank_transfers_nothing():
    split, x = AxialSplit.from_layout(Layout()), whole(1)
    pending = split.start_gather(x, 1, summed=True), split.start_transpose(x, 1, 2)
    for result in (split.shard(x, 1), split.gather(x, 1), split.gather_summed(x, 2), split.transpose(x, 1, 2)):
        assert result is x
    assert all(each.wait() is x for each in pending)
    assert split.offset(7) == 0


@pytest.mark.parametrize(("ranks", "index", "message"), [(2, 2, "shard 2 of 2"), (2, 0, "no group")])
def test_a_split_without_sense_is_refused(ranks, index, message):
    with pytest.raises(ValueError, match=message):
        AxialSplit(ranks, index)
