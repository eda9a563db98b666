"""Test copies of rows, byte by byte, against indexing in PyTorch, and the rows of a store.

tests/test_interpreted_kernels.py runs this file.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from benchmarks.rgat.ops import gather_rows
from benchmarks.rgat.ops.gather_rows import triton as gather_triton
from benchmarks.rgat.ops.gather_rows.reference import ShardedRows, gather_rows_reference
from benchmarks.rgat.stores.features import build_features, from_tables
from common.distributed.layout import Layout
from common.ops.operation import AUTO, OperationRequest
from tests.benchmarks.rgat import store_ranks as small

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")
NODES = (37, 1, 5, 64)
"""Nodes of each type."""

ROOM = (20, 0, 4, 9)
COUNT = (13, 0, 4, 7)
UNTOUCHED = 7


def tables(row_bytes: int) -> list[Tensor]:
    """The rows of each type."""
    random = torch.Generator().manual_seed(row_bytes)
    return [torch.randint(256, (count, row_bytes), generator=random, dtype=torch.uint8) for count in NODES]


def sharded(of_types: list[Tensor], shards: int) -> ShardedRows:
    """The same rows in shards, between which the last ones of a type have none."""
    per_shard = [-(-len(table) // shards) for table in of_types]
    held = []
    for shard in range(shards):
        parts = []
        for table, size in zip(of_types, per_shard, strict=True):
            part = torch.full((size, table.shape[1]), 255, dtype=torch.uint8)
            own = table[shard * size : (shard + 1) * size]
            part[: len(own)] = own
            parts.append(part)
        held.append(torch.cat(parts))
    first_rows = tuple(accumulate(per_shard, initial=0))[:-1]
    return ShardedRows(tuple(held), tuple(per_shard), first_rows, CPU)


def block() -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Nodes, the first and the last of each type among them and none beyond the counts; counts; offsets."""
    random = torch.Generator().manual_seed(3)
    offsets = tuple(accumulate(ROOM, initial=0))
    node = torch.full((offsets[-1],), 1 << 30, dtype=torch.int32)  # what lies beyond the counts is anything
    for first, count, nodes in zip(offsets, COUNT, NODES, strict=False):
        node[first : first + count] = torch.randint(nodes, (count,), generator=random, dtype=torch.int32)
        if count > 1:
            node[first], node[first + count - 1] = 0, nodes - 1
    return node, torch.tensor(COUNT, dtype=torch.int32), offsets


def expected(of_types: list[Tensor], node: Tensor, offsets: tuple[int, ...]) -> Tensor:
    out = torch.full((offsets[-1], of_types[0].shape[1]), UNTOUCHED, dtype=torch.uint8)
    for table, first, count in zip(of_types, offsets, COUNT, strict=False):
        for place in range(first, first + count):
            out[place] = table[int(node[place])]
    return out


@pytest.mark.parametrize("gather", [gather_triton.gather_rows, gather_rows_reference], ids=["triton", "reference"])
@pytest.mark.parametrize(("shards", "row_bytes"), [(1, 16), (2, 6), (5, 5)])
def test_every_node_gets_its_row_and_the_rest_stays(gather, shards: int, row_bytes: int) -> None:
    of_types, (node, count, offsets) = tables(row_bytes), block()
    out = torch.full((offsets[-1], row_bytes), UNTOUCHED, dtype=torch.uint8)
    gather(sharded(of_types, shards), node, count, offsets, out)
    assert torch.equal(out, expected(of_types, node, offsets))


@pytest.mark.parametrize("dtype", [small.E4M3, torch.float16, torch.float32], ids=str)
def test_a_store_gathers_by_the_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, launches = small.made(dtype), []
    monkeypatch.setattr(
        gather_triton, "gather_rows", lambda *given, gather=gather_triton.gather_rows: launches.append(gather(*given))
    )
    store = build_features(small.NODES, small.WIDTH, dtype, "local", Layout(), 1, CPU, from_tables(graph.features))
    for seed, counts in enumerate([(17, 12, 2, 0), (0, 0, 0, 0), (25, 15, 3, 1)]):
        one = small.block(seed, CPU, counts)
        out = small.room(one, dtype)
        store.gather(one, store.plan(one), out)
        assert torch.equal(out.view(torch.uint8), small.expected(graph, one))
    assert len(launches) == 3


def test_a_block_without_room() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    out = torch.zeros(0, 16, dtype=torch.uint8)
    gather_triton.gather_rows(sharded(tables(16), 2), none, torch.zeros(4, dtype=torch.int32), (0,) * 5, out)


def test_what_does_not_fit_is_refused() -> None:
    rows, (node, count, offsets) = sharded(tables(16), 2), block()
    out = torch.zeros(offsets[-1], 16, dtype=torch.uint8)
    for arguments in (
        (rows, node.long(), count, offsets, out),
        (rows, node, count[:3], offsets, out),
        (rows, node, count, offsets, out[:, :8]),
        (rows, node, count, offsets, out[:-1]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            gather_triton.gather_rows(*arguments)


def test_kernels_are_chosen_where_triton_runs() -> None:
    assert gather_rows.GATHER_ROWS.select(AUTO, OperationRequest(CPU, torch.uint8)).name == "triton"
