"""Triton's sampler against the plain one, which has to be met bit by bit; run by tests/test_interpreted_kernels.py.
Fresh memory holds the largest integers here."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rgat.capacities import largest_shape
from benchmarks.rgat.ops import sample
from benchmarks.rgat.ops.sample import triton as sample_triton
from benchmarks.rgat.ops.sample.plain import plain_sampler
from benchmarks.rgat.ops.sample.triton import Tile, triton_sampler
from common.ops.implementation import AUTO, OperationRequest, select
from tests.benchmarks.rgat.sample_oracle import NODES, filled, sharded, small_graph
from tests.benchmarks.rgat.small_rooms import SMALL_ROOMS, smaller

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FANOUTS = (4, 3, 2)
SEEDS = 7


def some_seeds(number: int) -> torch.Tensor:
    return torch.randperm(NODES[1], generator=torch.Generator().manual_seed(number))[:SEEDS].int()


def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many programs that those of a relation continue one another's numbers."""
    for key in sample_triton.TILES:
        monkeypatch.setitem(sample_triton.TILES, key, Tile(32, 1))


def test_blocks_are_the_plain_ones_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    few_items(monkeypatch)
    graph = small_graph()
    shape = largest_shape(graph, SEEDS, FANOUTS)
    sampler, plain = triton_sampler(graph, FANOUTS, shape), plain_sampler(graph, FANOUTS, shape)
    for number, count in ((0, SEEDS), (1, torch.tensor([3], dtype=torch.int32)), (0, SEEDS)):
        seeds, seed = some_seeds(number), torch.tensor(number - (1 << 50))
        assert filled(sampler(seeds, count, seed)) == filled(plain(seeds, count, seed))


@pytest.mark.parametrize("fanouts", [(16, 2), (1,)], ids=str)
def test_other_fanouts_and_shards(fanouts: tuple[int, ...]) -> None:
    graph, seeds = sharded(small_graph(1), 2), some_seeds(1)
    shape = largest_shape(graph, SEEDS, fanouts)
    blocks = [build(graph, fanouts, shape)(seeds, SEEDS, torch.tensor(3)) for build in (triton_sampler, plain_sampler)]
    assert filled(blocks[0]) == filled(blocks[1])


def test_no_seeds() -> None:
    graph = small_graph()
    shape = largest_shape(graph, SEEDS, (2,))
    blocks = [build(graph, (2,), shape)(some_seeds(0), 0, torch.tensor(3)) for build in (triton_sampler, plain_sampler)]
    assert filled(blocks[0]) == filled(blocks[1])


def assert_cut_as_plain(table: str, hop: int, name: str) -> None:
    graph, seeds = small_graph(), some_seeds(0)
    full = plain_sampler(graph, FANOUTS, largest_shape(graph, SEEDS, FANOUTS))(seeds, SEEDS, torch.tensor(1))
    shape = smaller(full, table, hop, name)
    sampler, plain = triton_sampler(graph, FANOUTS, shape), plain_sampler(graph, FANOUTS, shape)
    for number in (1, 2):
        cut, expected = (each(seeds, SEEDS, torch.tensor(number)) for each in (sampler, plain))
        assert expected.overflow.item() == 1 or number == 2
        assert filled(cut) == filled(expected)


@pytest.mark.parametrize(("table", "hop", "name"), SMALL_ROOMS[1::3])
def test_what_has_no_room_is_left_out_as_by_the_plain_one(table: str, hop: int, name: str) -> None:
    assert_cut_as_plain(table, hop, name)


@pytest.mark.slow
@pytest.mark.parametrize(("table", "hop", "name"), SMALL_ROOMS)
def test_every_kind_of_room_is_cut_as_by_the_plain_one(
    table: str, hop: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_items(monkeypatch)
    assert_cut_as_plain(table, hop, name)


def test_kernels_are_chosen_where_triton_runs() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float32)
    assert select(sample.IMPLEMENTATIONS, AUTO, request).name == "triton"
