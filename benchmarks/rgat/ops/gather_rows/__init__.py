"""Copies of the rows of a block's nodes from shards on this GPU, on other GPUs, or in host memory.

Rows are plain bytes. The kernel reads on the device how many nodes of each type are filled; the rest of the output
stays unchanged.

Shapes: N node entries of a block, B bytes per row, T types, S shards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.rgat.graph import device_table
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

LARGEST = (1 << 31) - 1
"""Maximum number of rows of a shard, because they are numbered in int32."""


@dataclass(frozen=True, eq=False)
class ShardedRows:
    """Rows of all types, as bytes. Node i of a type is in shard i // rows_per_shard.

    Attributes:
        shards: [S], uint8, [rows, B]; each in memory that the device can read.
        first_rows: offset of each type's rows in a shard.
        device: device that gathers.

    Raises:
        ValueError: shards have different dtypes or shapes, or one has too many rows.
    """

    shards: tuple[Tensor, ...]
    rows_per_shard: tuple[int, ...]
    first_rows: tuple[int, ...]
    device: torch.device

    def __post_init__(self) -> None:
        if len(self.rows_per_shard) != len(self.first_rows):
            raise ValueError(f"{len(self.rows_per_shard)} and {len(self.first_rows)} types")
        widths = {shard.shape[1:] for shard in self.shards}
        if len(widths) != 1 or any(shard.dtype != torch.uint8 or shard.dim() != 2 for shard in self.shards):
            raise ValueError("shards are one or more tensors of rows of bytes, as long in each")
        if not all(shard.is_contiguous() for shard in self.shards):
            raise ValueError("rows of a shard follow one another in memory")
        if any(len(shard) > LARGEST for shard in self.shards):
            raise ValueError(f"a shard has at most {LARGEST:,} rows")

    @property
    def row_bytes(self) -> int:
        """B, bytes per row."""
        return self.shards[0].shape[1]

    @functools.cached_property
    def addresses(self) -> Tensor:
        """[S], int64, on ``device``: addresses of the shards, for kernels."""
        return device_table([shard.data_ptr() for shard in self.shards], torch.int64, self.device)


def check(rows: ShardedRows, node_N: Tensor, count_T: Tensor, offsets: Sequence[int], out_NB: Tensor) -> None:
    """Check the arguments of a gather.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    types, entries = len(rows.rows_per_shard), offsets[-1]
    if len(offsets) != types + 1 or count_T.shape != (types,) or count_T.dtype != torch.int32:
        raise ValueError(f"{types} types, {len(offsets)} offsets, and counts {tuple(count_T.shape)}, {count_T.dtype}")
    if node_N.dtype != torch.int32 or node_N.dim() != 1 or len(node_N) < entries:
        raise ValueError(f"nodes {tuple(node_N.shape)}, {node_N.dtype}, for {entries} entries of int32")
    if out_NB.dtype != torch.uint8 or out_NB.dim() != 2 or out_NB.shape[1] != rows.row_bytes or len(out_NB) < entries:
        raise ValueError(f"output {tuple(out_NB.shape)}, {out_NB.dtype}, for {entries} rows of {rows.row_bytes} bytes")
    if not (node_N.is_contiguous() and count_T.is_contiguous() and out_NB.is_contiguous()):
        raise ValueError("nodes, counts and output are contiguous")


@torch.no_grad()
def gather_rows_reference(
    rows: ShardedRows, node_N: Tensor, count_T: Tensor, offsets: Sequence[int], out_NB: Tensor
) -> None:
    """Copy the row of every filled node; the rest of ``out_NB`` stays unchanged.

    On CPUs it processes only filled entries; on other devices all entries, so that nothing waits for the device. It
    does wait for rows on another device than the nodes.

    Args:
        node_N: int32, nodes by type.
        count_T: int32, filled nodes of each type.
        offsets: [T + 1], offset of each type in ``node_N`` and ``out_NB``.
        out_NB: uint8, output rows.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check(rows, node_N, count_T, offsets, out_NB)
    on_host = node_N.device.type == "cpu"
    for number, (per_shard, first_row) in enumerate(zip(rows.rows_per_shard, rows.first_rows, strict=True)):
        first, capacity = offsets[number], offsets[number + 1] - offsets[number]
        capacity = int(count_T[number]) if on_host else capacity
        node, out = node_N[first : first + capacity], out_NB[first : first + capacity]
        if on_host and len(rows.shards) == 1:
            torch.index_select(rows.shards[0], 0, node + first_row, out=out)
            continue
        there = torch.arange(capacity, device=node.device) < count_T[number]
        for shard, held in enumerate(rows.shards):
            row = node - shard * per_shard
            own = there & (row >= 0) & (row < per_shard)
            at = row.where(own, 0) + first_row
            picked = held.index_select(0, at.to(held.device)).to(out.device)
            out.copy_(torch.where(own[:, None], picked, out))


GATHER_ROWS = Operation(
    "gather_rows",
    gather_rows_reference,
    {
        "triton": triton_kernels("benchmarks.rgat.ops.gather_rows.triton:gather_rows", dtypes=()),
    },
    kernel_names=(("gather", r"^gather_rows_"),),
    cases="benchmarks.rgat.ops.gather_rows.cases",
)
"""Signature: ``gather_rows(rows, node_N, count_T, offsets, out_NB)``; the dtype of a request is uint8."""
