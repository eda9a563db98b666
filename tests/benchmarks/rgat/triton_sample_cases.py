"""Test the Triton sampler, bit by bit against the reference, with shards and with capacities that are too small.

tests/test_interpreted_kernels.py runs this file. Fresh memory holds the largest integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks.rgat.ops.sample import triton as sample_triton
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.ops.sample.triton import triton_sampler
from benchmarks.rgat.sampling import largest_shape
from common.ops.tile import Tile
from tests.benchmarks.rgat.sample_oracle import NODES, SMALL_CAPACITIES, filled, sharded, small_graph, smaller

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SEEDS = 7


def some_seeds(number: int) -> torch.Tensor:
    return torch.randperm(NODES[1], generator=torch.Generator().manual_seed(number))[:SEEDS].int()


def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many programs that those of a relation continue one another's numbers."""
    for key in sample_triton.TILES:
        monkeypatch.setitem(sample_triton.TILES, key, Tile(items=32, warps=1))


def test_shards_and_a_count_on_the_host():
    fanouts, count = (5, 2), 5
    graph, seeds = sharded(small_graph(1), 2), some_seeds(1)
    shape = largest_shape(graph, SEEDS, fanouts)
    blocks = [
        build(graph, fanouts, shape)(seeds, count, torch.tensor(3)) for build in (triton_sampler, sampler_reference)
    ]
    assert filled(blocks[0]) == filled(blocks[1])


def assert_cut_as_plain(fanouts: tuple[int, ...], capacities: Sequence[tuple[str, int, str]]) -> None:
    graph, seeds = small_graph(), some_seeds(0)
    shape = largest_shape(graph, SEEDS, fanouts)
    full = sampler_reference(graph, fanouts, shape)(seeds, SEEDS, torch.tensor(1))
    for table, hop, name in capacities:
        shape = smaller(full, shape, table, hop, name)
    sampler, plain = triton_sampler(graph, fanouts, shape), sampler_reference(graph, fanouts, shape)
    for number in (1, 2):
        cut, expected = (each(seeds, SEEDS, torch.tensor(number)) for each in (sampler, plain))
        assert expected.overflow.item() == 1 or number == 2
        assert filled(cut) == filled(expected)


def test_entries_beyond_the_capacity_are_left_out_as_by_the_reference():
    capacities = [("nodes", 1, "paper"), ("edges", 1, "author__rev_by__paper"), ("rows", 1, "paper__cites__paper")]
    assert_cut_as_plain((3, 2), capacities)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", SMALL_CAPACITIES, ids=str)
def test_every_kind_of_capacity_cuts_as_in_the_reference(capacity, monkeypatch):
    few_items(monkeypatch)
    assert_cut_as_plain((4, 3, 2), [capacity])
