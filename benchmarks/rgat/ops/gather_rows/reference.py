"""Rows of a block's nodes out of shards, in plain PyTorch.

Shapes: N places of a block, B bytes of a row, T types, S shards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.rgat.device_tables import device_table

LARGEST = (1 << 31) - 1
"""Rows of a shard are numbered in int32."""


@dataclass(frozen=True, eq=False)
class ShardedRows:
    """Rows of all types, as bytes: node i of a type lies in shard i // rows_per_shard.

    Attributes:
        shards: [S], uint8, [rows, B]; each wherever the device can read it.
        rows_per_shard: of each type.
        first_rows: where each type's rows begin in a shard.
        device: of what gathers.

    Raises:
        ValueError: shards of other dtypes or shapes, or too many rows in one.
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
        """B."""
        return self.shards[0].shape[1]

    @functools.cached_property
    def addresses(self) -> Tensor:
        """[S], int64, on ``device``: where the shards begin, for kernels."""
        return device_table([shard.data_ptr() for shard in self.shards], torch.int64, self.device)


def check(rows: ShardedRows, node_N: Tensor, count_T: Tensor, offsets: Sequence[int], out_NB: Tensor) -> None:
    """Refuse what a kernel would misread.

    Raises:
        ValueError: shapes or dtypes that don't fit one another.
    """
    types, places = len(rows.rows_per_shard), offsets[-1]
    if len(offsets) != types + 1 or count_T.shape != (types,) or count_T.dtype != torch.int32:
        raise ValueError(f"{types} types, {len(offsets)} offsets, and counts {tuple(count_T.shape)}, {count_T.dtype}")
    if node_N.dtype != torch.int32 or node_N.dim() != 1 or len(node_N) < places:
        raise ValueError(f"nodes {tuple(node_N.shape)}, {node_N.dtype}, for {places} places of int32")
    if out_NB.dtype != torch.uint8 or out_NB.dim() != 2 or out_NB.shape[1] != rows.row_bytes or len(out_NB) < places:
        raise ValueError(f"room {tuple(out_NB.shape)}, {out_NB.dtype}, for {places} rows of {rows.row_bytes} bytes")
    if not (node_N.is_contiguous() and count_T.is_contiguous() and out_NB.is_contiguous()):
        raise ValueError("nodes, counts and room are contiguous")


@torch.no_grad()
def gather_rows_reference(
    rows: ShardedRows, node_N: Tensor, count_T: Tensor, offsets: Sequence[int], out_NB: Tensor
) -> None:
    """Copy the row of every node that is there; the rest of ``out_NB`` stays as it is.

    On CPUs it does the rows that are there, elsewhere all there is room for, as it waits for no device. It waits for
    rows that lie on another device than the nodes.

    Args:
        rows: where they lie.
        node_N: int32, nodes by type.
        count_T: int32, how many of each type are there.
        offsets: [T + 1]: where a type begins in ``node_N`` and ``out_NB``.
        out_NB: uint8, the rows' room.

    Raises:
        ValueError: shapes or dtypes that don't fit one another.
    """
    check(rows, node_N, count_T, offsets, out_NB)
    on_host = node_N.device.type == "cpu"
    for number, (per_shard, first_row) in enumerate(zip(rows.rows_per_shard, rows.first_rows, strict=True)):
        first, room = offsets[number], offsets[number + 1] - offsets[number]
        room = int(count_T[number]) if on_host else room
        node, out = node_N[first : first + room], out_NB[first : first + room]
        if on_host and len(rows.shards) == 1:
            torch.index_select(rows.shards[0], 0, node + first_row, out=out)
            continue
        there = torch.arange(room, device=node.device) < count_T[number]
        for shard, held in enumerate(rows.shards):
            place = node - shard * per_shard
            own = there & (place >= 0) & (place < per_shard)
            at = place.where(own, 0) + first_row
            picked = held.index_select(0, at.to(held.device)).to(out.device)
            out.copy_(torch.where(own[:, None], picked, out))
