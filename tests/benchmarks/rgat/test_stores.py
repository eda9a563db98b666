"""Features and edges in their placements: the same from each, and one error for what does not fit or is damaged."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.rgat import graph_store, sharded
from benchmarks.rgat.feature_store import build_features, open_features, order_of
from benchmarks.rgat.graph import Graph
from benchmarks.rgat.graph_store import graph_bytes, open_graph
from benchmarks.rgat.prepared import features_name, indices_name, indptr_name
from benchmarks.rgat.sharded import MemoryBytes, NodePartition, Ranks, ShardedArray, candidates, first_supported
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError, DeviceError, UnsupportedImplementation
from tests.benchmarks.rgat import store_ranks as small

CPU = torch.device("cpu")
RELATION = small.SCHEMA.relations[1]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def opened(root: Path, placement: str = "auto", **options):
    arguments = {"schema": small.SCHEMA, "nodes": small.NODES, "width": small.WIDTH} | options
    return open_features(root, placement=placement, layout=Layout(), ranks_per_node=1, **arguments)


@pytest.fixture(scope="module")
def store_ranks(tmp_path_factory):
    """Return a function from a number of ranks to the features and edges that each rank found."""
    return functools.cache(lambda world: small.ranks_found(world, tmp_path_factory.mktemp(f"stores{world}")))


# Features


@pytest.mark.parametrize("placement", ["auto", "local", "host"])
def test_every_node_that_is_there_gets_its_row(tmp_path, placement):
    graph = small.made()
    small.write(tmp_path, graph)
    store = opened(tmp_path, placement)
    assert (store.name, store.width) == ("local" if placement == "auto" else placement, small.WIDTH)
    small.assert_rows(store, graph)
    store.close()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_get_the_same_rows_from_every_placement(store_ranks, world):
    for of_rank in store_ranks(world):
        assert of_rank["features"] == {case: (name, 0) for case, name in small.PLACED.items()}


def test_features_are_synthesized_where_they_are_placed():
    graph = small.made()
    small.assert_rows(build_features(small.NODES, small.WIDTH, "local", Layout(), 1, small.from_tables(graph)), graph)


def test_memory_of_a_process_that_is_another_here_is_refused(monkeypatch):
    """As in containers that number their processes themselves: what is found under the number is not what was meant."""
    status = {"files": 0}

    def gathered(value: int, group: object, device: torch.device) -> list[int]:
        return [value, value + status["files"] if value == status.get("inode") else value]

    with open(__file__) as another:
        status |= {"files": 1, "inode": os.fstat(another.fileno()).st_ino}
        monkeypatch.setattr(os, "memfd_create", lambda *_: os.dup(another.fileno()))
        monkeypatch.setattr(os, "ftruncate", lambda *_: None)
        monkeypatch.setattr(sharded.symmetric_memory, "gathered", gathered)
        group = SimpleNamespace(rank=lambda: 0)
        with pytest.raises(DeviceError, match=r"cannot be mapped: process \d+ is another one here; do they run in one"):
            ShardedArray("host", 4096, group, CPU)


@pytest.mark.parametrize(("nodes", "shards"), [((10, 3, 1), 4), ((7,), 7), ((5, 5), 1), ((1, 1), 3)], ids=str)
def test_every_node_lies_in_the_shard_that_its_number_says(nodes, shards):
    partition = NodePartition(nodes, shards)
    for number, count in enumerate(nodes):
        shares = [partition.share(number, shard) for shard in range(shards)]
        assert [node for first, last in shares for node in range(first, last)] == list(range(count))
        for shard, (first, last) in enumerate(shares):
            assert all(node // partition.rows_per_shard[number] == shard for node in range(first, last))
    assert partition.rows == partition.first_rows[-1] + partition.rows_per_shard[-1]


# Where they fit

ROW = 1000
MANY = (10_000_000,)
"""10 GB of rows."""


def placed(requested: str, ranks: Ranks, free: tuple[float, float]) -> tuple[str, ...]:
    return candidates(
        "features",
        requested,
        order_of(ranks),
        ranks,
        MemoryBytes(*free),
        lambda shards: NodePartition(MANY, shards).rows * ROW,
    )


@pytest.mark.parametrize(
    ("ranks", "capacity", "expected"),
    [
        (Ranks(1, 8, True), (11e9, 50e9), ("local", "host")),
        (Ranks(1, 8, True), (9e9, 50e9), ("host",)),
        (Ranks(4, 8, True), (11e9, 50e9), ("peers", "exchange", "host")),
        (Ranks(4, 8, True), (3e9, 50e9), ("peers", "exchange", "host")),
        (Ranks(4, 8, True), (2e9, 50e9), ("host",)),
        (Ranks(16, 8, True), (11e9, 50e9), ("exchange",)),
        (Ranks(2, 8, False), (0.0, 50e9), ("exchange", "host")),
        (Ranks(2, 8, False), (0.0, 12e9), ("exchange", "host")),
    ],
    ids=str,
)
def test_auto_takes_what_fits(ranks, capacity, expected):
    assert placed("auto", ranks, capacity) == expected


@pytest.mark.parametrize(
    ("requested", "ranks", "capacity", "message"),
    [
        ("local", Ranks(4, 8, True), (3e9, 5e9), r"do not fit: they need 10.0 GB of each GPU \(local\), and "
         r"3.0 GB of each GPU and 5.0 GB of each host are free; choose 'peers' or 'exchange'"),
        ("host", Ranks(4, 8, True), (11e9, 5e9), r"10.0 GB of each host \(host\).*choose 'peers' or 'exchange'"),
        ("auto", Ranks(2, 8, True), (3e9, 5e9), r"need 5.0 GB of each GPU \(peers\) or "
         r".*use more GPUs or a smaller graph"),
        ("auto", Ranks(16, 8, True), (3e8, 5e9), r"0.6 GB of each GPU \(exchange\), and 0.3 GB of each GPU"),
        ("peers", Ranks(16, 8, True), (9e9, 5e9), r"one node, and there are 16, 8 on each; choose 'exchange'"),
        ("peers", Ranks(2, 8, False), (0.0, 50e9), r"it needs GPUs; choose 'exchange' or 'host'"),
        ("exchange", Ranks(1, 8, True), (11e9, 5e9), r"it needs two ranks or more; choose 'local'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_says_what_would(requested, ranks, capacity, message):
    with pytest.raises(ConfigError, match=message):
        placed(requested, ranks, capacity)


def test_every_node_may_have_a_copy_of_the_edges_but_not_of_the_features():
    ranks, free = Ranks(16, 8, True), MemoryBytes(5e9, 5e9)
    assert candidates("edges", "peers", (), ranks, free, lambda shards: 30e9 / shards, node_copies=True) == ("peers",)
    with pytest.raises(ConfigError, match="one node"):
        candidates("features", "peers", (), ranks, free, lambda shards: 30e9 / shards)


def test_the_next_placement_is_taken_if_the_first_cannot_be_mapped():
    def build(name):
        if name == "peers":
            raise UnsupportedImplementation("no mapping")
        return name

    assert first_supported("features", ("peers", "exchange", "host"), build) == "exchange"
    with pytest.raises(UnsupportedImplementation, match="no mapping"):
        first_supported("features", ("peers",), build)


def test_a_store_that_memory_cannot_hold_is_one_error(tmp_path, monkeypatch):
    small.write(tmp_path, small.made())
    monkeypatch.setattr(sharded, "meminfo", lambda: {"MemAvailable": int(sharded.LEFT_FREE) + 100})
    for what, open_store in (("features", opened), ("edges", opened_graph)):
        with pytest.raises(ConfigError, match=rf"{what} of .* do not fit: .* of each host are free; use more GPUs or"):
            open_store(tmp_path)


# Files


def assert_refused(root: Path, message: str, **options) -> None:
    with pytest.raises(DataError, match=message):
        opened(root, "local", **options)


def test_damaged_files_are_one_error_each(tmp_path):
    small.write(tmp_path, small.made())
    path = tmp_path / features_name("author")
    whole = np.load(path)
    np.save(tmp_path / features_name("paper"), np.zeros((50, 24), np.float16))
    assert_refused(tmp_path, r"paper.npy holds <f2 and not .u1")
    small.write(tmp_path, small.made())
    assert_refused(tmp_path, r"paper.npy holds an array \(50, 24\) and not \(50, 12\)", width=12)
    np.save(path, whole[:-1])
    assert_refused(tmp_path, r"author.npy holds an array \(30, 24\) and not \(31, 24\)")
    np.save(path, whole)
    path.write_bytes(path.read_bytes()[:-5])
    assert_refused(tmp_path, r"author.npy has 867 bytes and not 872")
    path.write_bytes(whole.tobytes())
    assert_refused(tmp_path, r"author.npy cannot be read as an .npy file.*without a header")
    path.unlink()
    assert_refused(tmp_path, r"author.npy")


# Edges

Shards = tuple[tuple[Tensor, ...], ...]


def opened_graph(root: Path, placement: str = "auto") -> Graph:
    return open_graph(root, small.SCHEMA, small.NODES, placement, Layout(), 1)


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
    graph = opened_graph(tmp_path, placement)
    assert graph.edges == small.EDGES
    assert graph.shards == 1
    assert_edges(graph.indptr, graph.indices)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_read_a_shard_each_and_see_all(store_ranks, world):
    for found in store_ranks(world):
        indptr, indices = found["graph"]
        assert len(indptr[0]) == world
        assert_edges(indptr, indices)


def test_a_relation_without_edges(tmp_path):
    made = small.made()
    empty = small.Made(made.features, [torch.zeros_like(one) for one in made.indptr], [one[:0] for one in made.indices])
    small.write(tmp_path, empty)
    graph = opened_graph(tmp_path)
    assert graph.edges == (0, 0, 0)
    assert all(not shard.any() for shards in graph.indptr for shard in shards)


def test_files_of_several_pieces_are_checked_across_them(tmp_path, monkeypatch):
    monkeypatch.setattr(small, "NODES", (3000, 2500, 2, 1))
    monkeypatch.setattr(small, "EDGES", (5000, 4000, 4000))
    made = small.made()
    small.write(tmp_path, made)
    monkeypatch.setattr(sharded, "PIECE_BYTES", 8192)
    graph = opened_graph(tmp_path)
    for number in range(3):
        assert torch.equal(graph.indptr[number][0], made.indptr[number])
        assert torch.equal(graph.indices[number][0], made.indices[number])
    # The first number of the second piece is below the last of the first one.
    place = (8192 - 128) // 8
    indptr = made.indptr[0].clone()
    indptr[place:] = torch.where(torch.arange(len(indptr) - place) < 5, indptr[place - 1] - 1, indptr[place:])
    np.save(tmp_path / indptr_name(small.SCHEMA.relations[0]), indptr.numpy())
    with pytest.raises(DataError, match="does not ascend"):
        opened_graph(tmp_path)


def assert_graph_refused(root: Path, indptr: Tensor | None, indices: Tensor | None, message: str) -> None:
    """The small graph with other files of one relation is refused."""
    small.write(root, small.made())
    if indptr is not None:
        np.save(root / indptr_name(RELATION), indptr.numpy())
    if indices is not None:
        np.save(root / indices_name(RELATION), indices.numpy())
    with pytest.raises(DataError, match=message):
        opened_graph(root)


def test_damaged_files_of_edges_are_one_error_each(tmp_path):
    made = small.made()
    indptr, indices = made.indptr[1], made.indices[1]
    above, below, swapped = indices.clone(), indices.clone(), indptr.clone()
    above[7], below[9], swapped[5] = 50, -3, 40
    swapped[6] = 2
    assert_graph_refused(tmp_path, None, above, r"indices.npy has an edge from node 50 of paper, .* there are 50;")
    assert_graph_refused(tmp_path, None, below, r"indices.npy has an edge from node -3 of paper")
    assert_graph_refused(tmp_path, swapped, None, r"indptr.npy does not ascend among targets 0 to 31")
    assert_graph_refused(tmp_path, indptr + 1, None, r"goes from 1 to 41 and not from 0 to the 40 edges")
    assert_graph_refused(tmp_path, None, indices[:-1], r"goes from 0 to 40 and not from 0 to the 39 edges")
    assert_graph_refused(tmp_path, indptr[:-1], None, r"\(31,\) and not \(32\)")
    assert_graph_refused(tmp_path, indptr.int(), None, r"holds <i4 and not <i8")
    assert_graph_refused(tmp_path, None, indices.long(), r"holds <i8 and not <i4")
    (tmp_path / indices_name(RELATION)).unlink()
    with pytest.raises(DataError, match=r"indices.npy"):
        opened_graph(tmp_path)


def test_a_graph_of_peers_needs_gpus(tmp_path):
    small.write(tmp_path, small.made())
    with pytest.raises(ConfigError, match="edges cannot be placed as 'peers': it needs GPUs; choose 'local'"):
        opened_graph(tmp_path, "peers")


@pytest.mark.parametrize(("placement", "error"), [("auto", ConfigError), ("peers", UnsupportedImplementation)])
def test_a_graph_that_fits_no_gpu_and_cannot_be_shared_is_named(tmp_path, monkeypatch, placement, error):
    """GPUs that cannot map each other's memory; with ``auto`` the message has the sizes of what was tried last."""

    def refuse(self: object, name: str, *arguments: object) -> None:
        raise UnsupportedImplementation("no mapping")

    tried = []

    def usable(what: str, requested: str, order: tuple[str, ...], *arguments: object, **options: object) -> tuple[str]:
        tried.append(order)
        if len(tried) == 2:
            raise ConfigError("edges of 9.0 GB do not fit")
        return ("peers",)

    small.write(tmp_path, small.made())
    monkeypatch.setattr(graph_store.GraphFiles, "graph", refuse)
    monkeypatch.setattr(graph_store, "candidates", usable)
    with pytest.raises(error, match=r"edges of 9\.0 GB|edges cannot be placed as 'peers': no mapping"):
        opened_graph(tmp_path, placement)


def test_bytes_of_a_graph():
    assert graph_bytes(small.SCHEMA, small.NODES, (1, 2, 3)) == 8 * (51 + 32 + 51) + 4 * 6
