"""Test and benchmark cases of gathering rows: the nodes of a block, from e4m3 features of an eighth of IGBH-Full."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.rgat.ops.block_of_cases import SEEDS, block_of_cases
from benchmarks.rgat.ops.gather_rows import ShardedRows
from benchmarks.rgat.sharded import NodePartition
from benchmarks.rgat.synthetic import IGBH_EIGHTH, igbh_proportions
from common.ops.cases import Case, Draw, Pass

UNTOUCHED = 7
"""Initial value of each output byte. Rows of unfilled nodes must keep it."""

DRAWN = 1 << 16
"""Rows that are drawn at once; the limit is needed because random integers take 64 bits each."""


def passes(
    function: Callable[..., None],
    draw: Draw,
    seeds: int,
    papers: int,
    row_bytes: int,
    shards: int = 1,
    host: bool = False,
) -> list[Pass]:
    """Return the forward pass, which gathers the rows of all nodes around ``seeds`` papers.

    Args:
        row_bytes: bytes per row.
        shards: number of shards, all on this GPU. The kernel looks up their addresses like those of other GPUs.
        host: whether rows are in host memory.
    """
    block = block_of_cases(draw.device, seeds, papers)
    schema, hops = block.shape.schema, block.shape.hops
    partition = NodePartition(tuple(igbh_proportions(schema, papers)[0]), shards)
    pinned = host and draw.device.type == "cuda"
    held = []
    for _ in range(shards):
        shard = torch.empty(
            (partition.rows, row_bytes),
            dtype=torch.uint8,
            device="cpu" if host else draw.device,
            pin_memory=pinned,
        )
        for part in shard.split(DRAWN):
            part.copy_(draw.integers(0, 256, *part.shape, dtype=torch.uint8))
        held.append(shard)
    rows = ShardedRows(tuple(held), partition.rows_per_shard, partition.first_rows, draw.device)
    offsets, counts = block.shape.node_offsets(hops), block.node_counts[hops]
    out = torch.full((offsets[-1], row_bytes), UNTOUCHED, dtype=torch.uint8, device=draw.device)

    def gather() -> torch.Tensor:
        function(rows, block.nodes, counts, offsets, out)
        return out

    moved = float(int(counts.sum()) * (2 * row_bytes + block.nodes.element_size()))
    return [Pass("forward", gather, moved)]


SIZES = {"seeds": SEEDS, "papers": IGBH_EIGHTH, "row_bytes": 1024}
FEW = {"seeds": 4, "papers": 300}
GPU = {"seeds": 128, "papers": IGBH_EIGHTH // 16}


def _case(name: str, *tests: dict[str, int], gpu: dict[str, int], **sizes: int) -> Case:
    return Case(
        name,
        passes,
        {**SIZES, **sizes},
        tests=[{**FEW, **each} for each in tests],
        gpu=gpu,
        dtypes=(torch.float16,),
        exact=True,
    )


CASES = (
    _case("local", {"row_bytes": 16}, {"row_bytes": 1000}, {"row_bytes": 1030}, {"row_bytes": 1023}, gpu=GPU),
    _case("8 shards", {"row_bytes": 48}, {"row_bytes": 1000, "shards": 5}, {"row_bytes": 6}, gpu=GPU, shards=8),
    _case("host", {"row_bytes": 512}, gpu=GPU, papers=IGBH_EIGHTH // 16, host=True),
)
"""Cases by placement. The host case has fewer nodes, because pinning all takes minutes."""
