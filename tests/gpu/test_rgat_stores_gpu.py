"""Test R-GAT's stores on one GPU: rows are copied from any placement without waiting, eagerly and in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rgat.feature_store import ExchangedFeatures, build_features, open_features
from benchmarks.rgat.graph_store import open_graph
from benchmarks.rgat.ops.gather_rows import GATHER_ROWS, ShardedRows, gather_rows_reference
from benchmarks.rgat.sharded import LEFT_FREE, NodePartition, ShardedArray
from common.distributed.layout import Layout
from common.errors import ConfigError
from tests.benchmarks.rgat import store_ranks as small
from tests.gpu.support import captured

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
NODES = (20_001, 7, 9_000)
CAPACITY, COUNT = (20_000, 0, 9_000), (18_777, 0, 8_500)
OFFSETS = tuple(accumulate(CAPACITY, initial=0))
UNTOUCHED = 7


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Reset the debug mode in which waiting for the device is an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def sharded(row_bytes: int, shards: int, pinned: bool) -> tuple[ShardedRows, ShardedRows]:
    """Return rows on the GPU or in pinned memory, and the same rows for a CPU."""
    partition = NodePartition(NODES, shards)
    random = torch.Generator().manual_seed(row_bytes + shards)
    held = [torch.randint(256, (partition.rows, row_bytes), generator=random, dtype=torch.uint8) for _ in range(shards)]
    there = tuple(shard.pin_memory() if pinned else shard.to(CUDA) for shard in held)
    first_rows = partition.first_rows
    return (
        ShardedRows(there, partition.rows_per_shard, first_rows, CUDA),
        ShardedRows(tuple(held), partition.rows_per_shard, first_rows, torch.device("cpu")),
    )


def nodes(seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    drawn = torch.full((OFFSETS[-1],), 1 << 30, dtype=torch.int32)
    for first, count, existing in zip(OFFSETS, COUNT, NODES, strict=False):
        drawn[first : first + count] = torch.randint(existing, (count,), generator=random, dtype=torch.int32)
    return drawn


def expected(rows: ShardedRows, node: Tensor, count: tuple[int, ...] = COUNT) -> Tensor:
    out = torch.full((OFFSETS[-1], rows.row_bytes), UNTOUCHED, dtype=torch.uint8)
    gather_rows_reference(rows, node, torch.tensor(count, dtype=torch.int32), OFFSETS, out)
    return out


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("row_bytes", [1024, 4096, 2048, 96, 6])
def test_rows_are_those_of_the_cpu(row_bytes: int, shards: int, pinned: bool) -> None:
    rows, on_cpu = sharded(row_bytes, shards, pinned)
    node = nodes(1)
    wanted, count = expected(on_cpu, node), torch.tensor(COUNT, dtype=torch.int32, device=CUDA)
    out = torch.full((OFFSETS[-1], row_bytes), UNTOUCHED, dtype=torch.uint8, device=CUDA)
    GATHER_ROWS.function("triton")(rows, node.to(CUDA), count, OFFSETS, out)
    assert torch.equal(out.cpu(), wanted)


def test_rows_behind_two_gigabytes() -> None:
    count = (5 << 30) // 1024
    shard = torch.empty((count, 1024), dtype=torch.uint8, device=CUDA)
    node = torch.tensor([0, 2 << 20, count - 1, (4 << 20) + 1], dtype=torch.int32, device=CUDA)
    wanted = torch.arange(4, dtype=torch.uint8, device=CUDA)[:, None] + torch.arange(1024, device=CUDA).byte()
    shard[node.long()] = wanted
    out = torch.zeros((4, 1024), dtype=torch.uint8, device=CUDA)
    filled = torch.tensor([4], dtype=torch.int32, device=CUDA)
    GATHER_ROWS.function("triton")(ShardedRows((shard,), (count,), (0,), CUDA), node, filled, (0, 4), out)
    assert torch.equal(out, wanted)
    # As the second type of a shard, whose first rows are many.
    rows = ShardedRows((shard,), (4 << 20, 1 << 20), (0, 4 << 20), CUDA)
    filled = torch.tensor([0, 1], dtype=torch.int32, device=CUDA)
    GATHER_ROWS.function("triton")(rows, torch.ones_like(node), filled, (0, 2, 3), out)
    assert torch.equal(out[2], wanted[3])


@pytest.mark.parametrize("name", GATHER_ROWS.names)
def test_a_graph_gathers_what_its_nodes_and_counts_say_now(name: str) -> None:
    rows, on_cpu = sharded(1024, 3, False)
    function, node = GATHER_ROWS.function(name), nodes(1).to(CUDA)
    count = torch.tensor(COUNT, dtype=torch.int32, device=CUDA)
    out = torch.full((OFFSETS[-1], 1024), UNTOUCHED, dtype=torch.uint8, device=CUDA)
    graph, _ = captured(lambda: function(rows, node, count, OFFSETS, out))
    for seed, filled in enumerate([COUNT, (5, 0, 9_000), (0, 0, 0)]):
        drawn = nodes(seed)
        drawn[OFFSETS[2] + COUNT[2] : OFFSETS[2] + filled[2]] = 3
        node.copy_(drawn)
        count.copy_(torch.tensor(filled, dtype=torch.int32))
        out.fill_(UNTOUCHED)
        graph.replay()
        assert torch.equal(out.cpu(), expected(on_cpu, drawn, filled))


@pytest.mark.parametrize("placement", ["auto", "local", "host"])
@pytest.mark.usefixtures("no_waiting")
def test_every_node_that_is_there_gets_its_row(tmp_path: Path, placement: str) -> None:
    graph = small.made()
    small.write(tmp_path, graph)
    store = open_features(tmp_path, small.SCHEMA, small.NODES, small.WIDTH, placement, Layout(device=CUDA), 1)
    assert store.name == ("local" if placement == "auto" else placement)
    small.assert_rows(store, graph, CUDA)
    store.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Return an NCCL group of one rank."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=CUDA)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.usefixtures("no_waiting")
def test_rows_that_are_exchanged_are_waited_for_by_an_event_alone(alone: dist.ProcessGroup) -> None:
    graph = small.made()
    own = torch.cat(graph.features).view(torch.uint8).to(CUDA)
    store = ExchangedFeatures(NodePartition(small.NODES, 1), own, alone)
    with torch.cuda.stream(torch.cuda.Stream()):
        small.assert_rows(store, graph, CUDA)
        small.assert_rows(store, graph, CUDA)
    store.close()


def test_memory_of_the_host_is_pinned_as_long_as_it_is_open() -> None:
    memory = ShardedArray("host", 1 << 20, None, CUDA)
    memory.own.fill_(3)
    memory.share()
    assert memory.own.is_pinned()
    memory.close()
    assert not memory.own.is_pinned()
    assert memory.own.eq(3).all()


def test_features_larger_than_the_gpu_say_where_they_fit() -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(CUDA)[0]
    nodes = (int((free - LEFT_FREE) // 1024) + (1 << 20),)

    def fill(*_: object) -> None:
        pytest.fail("there was no free memory to fill")

    with pytest.raises(ConfigError, match=r"GB of each GPU \(local\), and .* GB of each GPU and .* are free;"):
        build_features(nodes, 1024, "local", Layout(device=CUDA), 1, fill)


def test_features_are_synthesized_where_they_are_placed() -> None:
    graph, layout = small.made(), Layout(device=CUDA)
    store = build_features(small.NODES, small.WIDTH, "local", layout, 1, small.from_tables(graph))
    small.assert_rows(store, graph, CUDA)


def test_a_graph_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = small.made()
    small.write(tmp_path, made)
    graph = open_graph(tmp_path, small.SCHEMA, small.NODES, "auto", Layout(device=CUDA), 1)
    assert graph.device == CUDA
    for number in range(len(made.indptr)):
        assert graph.indptr[number][0].device == CUDA
        assert torch.equal(graph.indptr[number][0].cpu(), made.indptr[number])
        assert torch.equal(graph.indices[number][0].cpu(), made.indices[number])
