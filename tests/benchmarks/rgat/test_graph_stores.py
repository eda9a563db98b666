"""Graphs read from files and cut into shards: every target keeps its edges; damaged files are one error each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.rgat.graph import Graph
from benchmarks.rgat.prepared_names import indices_name, indptr_name
from benchmarks.rgat.stores import placement as places
from benchmarks.rgat.stores.graphs import graph_bytes, graph_in_memory, open_graph
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError
from tests.benchmarks.rgat import store_ranks as small

CPU = torch.device("cpu")
RELATION = small.SCHEMA.relations[1]

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Shards = tuple[tuple[Tensor, ...], ...]


def opened(root: Path, placement: str = "auto") -> Graph:
    return open_graph(root, small.SCHEMA, small.NODES, placement, Layout(), 1, CPU)


def assert_edges(indptr: Shards, indices: Shards) -> None:
    """Every target of the small graph has its sources, in their order, in the shard that its number says."""
    graph = small.made()
    for number, target_type in enumerate(small.SCHEMA.targets):
        per_shard = len(indptr[number][0]) - 1
        assert {len(shard) for shard in indptr[number]} == {per_shard + 1}
        assert all(shard.dtype == torch.int64 for shard in indptr[number])
        assert all(shard.dtype == torch.int32 for shard in indices[number])
        assert all(int(shard[0]) == 0 for shard in indptr[number])
        for target in range(per_shard * len(indptr[number])):
            shard, place = divmod(target, per_shard)
            found = indices[number][shard][int(indptr[number][shard][place]) : int(indptr[number][shard][place + 1])]
            wanted = []
            if target < small.NODES[target_type]:
                first, last = graph.indptr[number][target : target + 2].tolist()
                wanted = graph.indices[number][first:last].tolist()
            assert found.tolist() == wanted
        assert sum(len(shard) for shard in indices[number]) == small.EDGES[number]


@pytest.mark.parametrize("placement", ["auto", "local"])
def test_a_graph_is_read_as_it_was_written(tmp_path, placement):
    small.write(tmp_path, small.made())
    graph = opened(tmp_path, placement)
    assert graph.edges == small.EDGES
    assert graph.shards == 1
    assert_edges(graph.indptr, graph.indices)


@pytest.mark.parametrize("shards", [1, 2, 3, 40])
def test_shards_of_tensors_have_all_edges(shards):
    made = small.made()
    graph = graph_in_memory(small.SCHEMA, small.NODES, made.indptr, made.indices, shards)
    assert graph.shards == shards
    assert_edges(graph.indptr, graph.indices)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_read_a_shard_each_and_see_all(store_ranks, world):
    for found in store_ranks(world):
        for indptr, indices in found["graphs"]:
            assert len(indptr[0]) == world
            assert_edges(indptr, indices)


def test_a_relation_without_edges(tmp_path):
    made = small.made()
    empty = small.Made(made.features, [torch.zeros_like(one) for one in made.indptr], [one[:0] for one in made.indices])
    small.write(tmp_path, empty)
    graph = opened(tmp_path)
    assert graph.edges == (0, 0, 0)
    assert all(not shard.any() for shards in graph.indptr for shard in shards)


def test_files_of_several_pieces_are_checked_across_them(tmp_path, monkeypatch):
    monkeypatch.setattr(small, "NODES", (3000, 2500, 2, 1))
    monkeypatch.setattr(small, "EDGES", (5000, 4000, 4000))
    made = small.made()
    small.write(tmp_path, made)
    monkeypatch.setattr("benchmarks.rgat.stores.row_loader.RowLoader.__init__.__defaults__", (8192,))
    graph = opened(tmp_path)
    for number in range(3):
        assert torch.equal(graph.indptr[number][0], made.indptr[number])
        assert torch.equal(graph.indices[number][0], made.indices[number])
    # The first number of the second piece is below the last of the first one.
    place = (8192 - 128) // 8
    indptr = made.indptr[0].clone()
    indptr[place:] = torch.where(torch.arange(len(indptr) - place) < 5, indptr[place - 1] - 1, indptr[place:])
    np.save(tmp_path / indptr_name(small.SCHEMA.relations[0]), indptr.numpy())
    with pytest.raises(DataError, match="does not ascend"):
        opened(tmp_path)


def assert_refused(root: Path, indptr: Tensor | None, indices: Tensor | None, message: str) -> None:
    """The small graph with other files of one relation is refused."""
    small.write(root, small.made())
    if indptr is not None:
        np.save(root / indptr_name(RELATION), indptr.numpy())
    if indices is not None:
        np.save(root / indices_name(RELATION), indices.numpy())
    with pytest.raises(DataError, match=message):
        opened(root)


def test_damaged_files_are_one_error_each(tmp_path):
    made = small.made()
    indptr, indices = made.indptr[1], made.indices[1]
    beyond, below, swapped = indices.clone(), indices.clone(), indptr.clone()
    beyond[7], below[9], swapped[5] = 50, -3, 40
    swapped[6] = 2
    assert_refused(tmp_path, None, beyond, r"indices.npy has an edge from node 50 of paper, of which there are 50;")
    assert_refused(tmp_path, None, below, r"indices.npy has an edge from node -3 of paper")
    assert_refused(tmp_path, swapped, None, r"indptr.npy does not ascend among targets 0 to 31")
    assert_refused(tmp_path, indptr + 1, None, r"goes from 1 to 41 and not from 0 to the 40 edges")
    assert_refused(tmp_path, None, indices[:-1], r"goes from 0 to 40 and not from 0 to the 39 edges")
    assert_refused(tmp_path, indptr[:-1], None, r"\(31,\) and not \(32\)")
    assert_refused(tmp_path, indptr.int(), None, r"holds <i4 and not <i8")
    assert_refused(tmp_path, None, indices.long(), r"holds <i8 and not <i4")
    (tmp_path / indices_name(RELATION)).unlink()
    with pytest.raises(DataError, match=r"indices.npy"):
        opened(tmp_path)


def test_a_graph_without_room_is_one_error(tmp_path, monkeypatch):
    small.write(tmp_path, small.made())
    monkeypatch.setattr(places, "meminfo", lambda: {"MemAvailable": int(places.LEFT_FREE) + 100})
    with pytest.raises(ConfigError, match=r"as 'local' needs .* and 0.0 GB are free; use more GPUs or a smaller graph"):
        opened(tmp_path)


def test_placements_that_cannot_be(tmp_path):
    small.write(tmp_path, small.made())
    with pytest.raises(ConfigError, match="it needs GPUs"):
        opened(tmp_path, "peers")
    with pytest.raises(ConfigError, match="choose one of auto, local, peers"):
        opened(tmp_path, "host")


def test_bytes_of_a_graph():
    assert graph_bytes(small.SCHEMA, small.NODES, (1, 2, 3)) == 8 * (51 + 32 + 51) + 4 * 6
