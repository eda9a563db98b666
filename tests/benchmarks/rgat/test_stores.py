"""Features and graphs in their places: the same rows from each, and one error for what does not fit or is damaged."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.rgat.prepared_names import features_name
from benchmarks.rgat.stores import host_memory
from benchmarks.rgat.stores import placement as places
from benchmarks.rgat.stores.features import build_features, from_tables, open_features
from benchmarks.rgat.stores.host_memory import NodeMemory
from benchmarks.rgat.stores.partition import Partition
from benchmarks.rgat.stores.placement import Ranks, Room, candidates
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError, DeviceError
from tests.benchmarks.rgat import store_ranks as small

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def opened(root: Path, placement: str = "auto", dtype: torch.dtype = small.E4M3, **options):
    arguments = {"schema": small.SCHEMA, "nodes": small.NODES, "width": small.WIDTH} | options
    return open_features(
        root, dtype=dtype, placement=placement, layout=Layout(), ranks_per_node=1, device=CPU, **arguments
    )


# Features


@pytest.mark.parametrize("placement", ["auto", "local", "host"])
@pytest.mark.parametrize("dtype", [small.E4M3, torch.float16, torch.float32], ids=str)
def test_every_node_that_is_there_gets_its_row(tmp_path, placement, dtype):
    graph = small.made(dtype)
    small.write(tmp_path, graph)
    store = opened(tmp_path, placement, dtype)
    assert store.name == ("local" if placement == "auto" else placement)
    assert (store.dtype, store.width) == (dtype, small.WIDTH)
    for seed, counts in enumerate([(17, 12, 2, 0), (0, 0, 0, 0), (25, 15, 3, 1)]):
        block = small.block(seed, CPU, counts)
        out = small.room(block, dtype)
        store.gather(block, store.plan(block), out)
        assert torch.equal(out.view(torch.uint8), small.expected(graph, block))
    store.close()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_get_the_same_rows_from_every_placement(store_ranks, world):
    for of_rank in store_ranks(world):
        found = of_rank["features"]
        assert {case: name for case, (name, _, _) in found.items()} == small.PLACED
        for case, (_, blocks, wrong) in found.items():
            assert blocks == 2 * small.BLOCKS, case
            assert wrong == 0, case


def test_features_are_made_up_where_they_lie():
    graph = small.made(torch.float16)
    store = build_features(
        small.NODES, small.WIDTH, torch.float16, "local", Layout(), 1, CPU, from_tables(graph.features)
    )
    block = small.block(0, CPU)
    out = small.room(block, torch.float16)
    store.gather(block, store.plan(block), out)
    assert torch.equal(out.view(torch.uint8), small.expected(graph, block))


def test_memory_of_a_process_that_is_another_here_is_refused(monkeypatch):
    """As in containers that number their processes themselves: what is found under the number is not what was meant."""
    said = {"files": 0}

    def gathered(value: int, group: object, device: torch.device) -> list[int]:
        return [value, value + said["files"] if value == said.get("inode") else value]

    with open(__file__) as another:
        said |= {"files": 1, "inode": os.fstat(another.fileno()).st_ino}
        monkeypatch.setattr(os, "memfd_create", lambda *_: os.dup(another.fileno()))
        monkeypatch.setattr(os, "ftruncate", lambda *_: None)
        monkeypatch.setattr(host_memory.one_machine, "gathered", gathered)
        group = SimpleNamespace(rank=lambda: 0)
        with pytest.raises(DeviceError, match=r"cannot be mapped: process \d+ is another one here; do they run in one"):
            NodeMemory(4096, group, CPU)


def test_room_of_another_dtype_or_width_is_refused(tmp_path):
    small.write(tmp_path, small.made())
    store, block = opened(tmp_path), small.block(0, CPU)
    out = small.room(block, small.E4M3)
    for wrong in (out.view(torch.uint8), out[:, :12].contiguous(), out.t().contiguous().t()):
        with pytest.raises(ValueError, match="contiguous"):
            store.gather(block, None, wrong)


@pytest.mark.parametrize(("nodes", "shards"), [((10, 3, 1), 4), ((7,), 7), ((5, 5), 1), ((1, 1), 3)], ids=str)
def test_every_node_lies_in_the_shard_that_its_number_says(nodes, shards):
    partition = Partition(nodes, shards)
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


@pytest.mark.parametrize(
    ("ranks", "room", "expected"),
    [
        (Ranks(1, 8, True), Room(11e9, 50e9), ("local", "host")),
        (Ranks(1, 8, True), Room(9e9, 50e9), ("host",)),
        (Ranks(4, 8, True), Room(11e9, 50e9), ("peers", "exchange", "host")),
        (Ranks(4, 8, True), Room(3e9, 50e9), ("peers", "exchange", "host")),
        (Ranks(4, 8, True), Room(2e9, 50e9), ("host",)),
        (Ranks(16, 8, True), Room(11e9, 50e9), ("exchange",)),
        (Ranks(2, 8, False), Room(0.0, 50e9), ("exchange", "host")),
        (Ranks(2, 8, False), Room(0.0, 12e9), ("exchange", "host")),
    ],
    ids=str,
)
def test_auto_takes_what_fits(ranks, room, expected):
    assert candidates("auto", ranks, MANY, ROW, room) == expected


@pytest.mark.parametrize(
    ("requested", "ranks", "room", "told"),
    [
        ("local", Ranks(4, 8, True), Room(3e9, 5e9), r"do not fit: they need 10.0 GB of each GPU \(local\), and "
         r"3.0 GB of each GPU and 5.0 GB of each host are free; choose 'peers' or 'exchange'"),
        ("host", Ranks(4, 8, True), Room(11e9, 5e9), r"10.0 GB of each host \(host\).*choose 'peers' or 'exchange'"),
        ("auto", Ranks(2, 8, True), Room(3e9, 5e9), r"need 5.0 GB of each GPU \(peers\) or "
         r".*use more GPUs, a smaller graph, or features of fewer bits"),
        ("auto", Ranks(16, 8, True), Room(3e8, 5e9), r"0.6 GB of each GPU \(exchange\), and 0.3 GB of each GPU"),
        ("peers", Ranks(16, 8, True), Room(9e9, 5e9), r"one node, and there are 16, 8 on each; choose 'exchange'"),
        ("peers", Ranks(2, 8, False), Room(0.0, 50e9), r"it needs GPUs; choose 'exchange' or 'host'"),
        ("exchange", Ranks(1, 8, True), Room(11e9, 5e9), r"it needs two ranks or more; choose 'local'"),
        ("shelf", Ranks(1, 8, True), Room(11e9, 5e9), r"'shelf'; choose one of auto, local, peers, host, exchange"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_says_what_would(requested, ranks, room, told):
    with pytest.raises(ConfigError, match=told):
        candidates(requested, ranks, MANY, ROW, room)


def test_a_store_without_room_is_one_error(tmp_path, monkeypatch):
    small.write(tmp_path, small.made())
    monkeypatch.setattr(places, "meminfo", lambda: {"MemAvailable": int(places.LEFT_FREE) + 100})
    with pytest.raises(ConfigError, match=r"do not fit: .* of each host are free"):
        opened(tmp_path)


# Files


def assert_refused(root: Path, message: str, **options) -> None:
    with pytest.raises(DataError, match=message):
        opened(root, "local", **options)


def test_damaged_files_are_one_error_each(tmp_path):
    small.write(tmp_path, small.made())
    path = tmp_path / features_name("author")
    whole = np.load(path)
    assert_refused(tmp_path, r"paper.npy holds .u1 and not <f2", dtype=torch.float16)
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


def test_features_of_other_dtypes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"one of torch.float8_e4m3fn, .* not torch.bfloat16"):
        opened(tmp_path, "local", torch.bfloat16)
