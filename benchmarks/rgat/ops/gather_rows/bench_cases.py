"""Rows of a sampled block's nodes, out of the features of an eighth of IGBH-Full: in e4m3, 1,024 to a row."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.rgat.made_up_graph import IGBH_EIGHTH, igbh_proportions
from benchmarks.rgat.ops import gather_rows
from benchmarks.rgat.ops.bench_block import bench_block
from benchmarks.rgat.ops.gather_rows.reference import ShardedRows
from benchmarks.rgat.schema import Schema
from benchmarks.rgat.stores.partition import Partition
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

PAPERS = IGBH_EIGHTH
ROW_BYTES = 1024
SEEDS = 2048
PEERS = 8
"""Shards, all on this GPU, whose addresses a program looks up as it does those of peers."""

CAPPED = (8, 16, 32, 64)
"""Programs that leave most of the GPU to others."""

HOST_SHARE = 16
"""Of the nodes, which are read out of the host's memory: pinning all takes minutes."""


def _rows(schema: Schema, papers: int, shards: int, host: bool) -> ShardedRows:
    """Rows of all nodes, that hold anything."""
    partition = Partition(tuple(igbh_proportions(schema, papers)[0]), shards)
    place: dict[str, Any] = {"pin_memory": True} if host else {"device": cases.DEVICE}
    held = tuple(torch.empty((partition.rows, ROW_BYTES), dtype=torch.uint8, **place) for _ in range(shards))
    return ShardedRows(held, partition.rows_per_shard, partition.first_rows, torch.device(cases.DEVICE))


def case(
    function: Callable[..., None],
    shards: int,
    host: bool,
    programs: int | None,
    batch: int,
    dtype: torch.dtype,
) -> list[Pass]:
    """The rows of all nodes around ``batch`` seeds; the dtype means nothing for bytes."""
    papers = PAPERS // HOST_SHARE if host else PAPERS
    block = bench_block(batch, torch.device(cases.DEVICE), papers)
    rows, hops = _rows(block.shape.schema, papers, shards, host), block.shape.hops
    offsets, count_T = block.shape.node_offsets(hops), block.node_counts[hops]
    out_NB = torch.empty((offsets[-1], ROW_BYTES), dtype=torch.uint8, device=cases.DEVICE)
    moved = float(int(count_T.sum()) * (2 * ROW_BYTES + block.nodes.element_size()))
    return [Pass("forward", lambda: function(rows, block.nodes, count_T, offsets, out_NB, programs), moved)]


def entries() -> list[Entry]:
    """Every implementation; then the kernel with many shards, with few programs, and on the host's memory."""

    def build(shards: int, host: bool, programs: int | None) -> Callable[..., list[Pass]]:
        def passes(function: Callable[..., None], batch: int, dtype: torch.dtype) -> list[Pass]:
            return case(function, shards, host, programs, batch, dtype)

        return passes

    operation, kernel = gather_rows.GATHER_ROWS, ["triton"]
    found = each("gather_rows", operation, "triton", {}, build(1, False, None))
    found += each(f"gather_rows {PEERS} shards", operation, "", {}, build(PEERS, False, None), only=kernel)
    for programs in CAPPED:
        found += each(f"gather_rows {programs} programs", operation, "", {}, build(1, False, programs), only=kernel)
    return found + each("gather_rows host", operation, "", {}, build(1, True, None), only=kernel)


def sweeps() -> dict[str, Sweep]:
    """Bytes under way, warps and programs; with few programs, bytes and warps."""
    from benchmarks.rgat.ops.gather_rows import triton

    function = gather_rows.GATHER_ROWS.function("triton")
    sizes = (8192, 16384, 32768, 65536)
    every = list(itertools.product(sizes, (2, 4, 8), (2, 3, 4, 6, 8)))
    few = list(itertools.product((*sizes, 131072), (4, 8, 16, 32), (1,)))
    found = {
        f"gather_rows {place}": Sweep(
            triton.TILES, "all", every, functools.partial(case, function, 1, host, None, SEEDS), False
        )
        for place, host in (("local", False), ("host", True))
    }
    for programs in CAPPED:
        build = functools.partial(case, function, 1, False, programs, SEEDS)
        found[f"gather_rows {programs} programs"] = Sweep(triton.TILES, "capped", few, build, False)
    return found
