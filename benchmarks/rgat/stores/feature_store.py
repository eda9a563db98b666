"""Interface of feature stores, and the store whose shards the device reads in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.rgat.graph import SampledBlock
from benchmarks.rgat.ops import gather_rows
from benchmarks.rgat.ops.gather_rows.reference import ShardedRows
from benchmarks.rgat.stores.partition import Partition
from common.ops.operation import AUTO, OperationRequest


class FeatureStore(Protocol):
    """Rows of F features for every node. Must be used on one stream, or on several that wait for one another.

    Attributes:
        name: ``local``, ``peers``, ``host`` or ``exchange``.
        dtype, width: dtype and number of features of a row.
    """

    name: str
    dtype: torch.dtype
    width: int

    def plan(self, block: SampledBlock) -> Any:
        """Return the ``plan`` for :meth:`gather` of a sampled block. Must run on all ranks in the same order."""
        ...

    def gather(self, block: SampledBlock, plan: Any, out_NF: Tensor) -> None:
        """Copy the rows of all nodes of the block; unfilled entries stay unchanged.

        Args:
            plan: result of :meth:`plan` for this block.
            out_NF: output in the store's dtype, [shape.node_offsets(H)[-1], F].
        """
        ...

    def close(self) -> None:
        """Free the memory after the device has completed its queued work."""
        ...


class InPlaceFeatures:
    """Feature store with shards in memory that the device can read: its own, mapped memory of other GPUs, or pinned.

    Args:
        name: name of the placement.
        shards: uint8, [partition.rows, bytes per row] each.
        dtype, width: dtype and number of features of a row.
        device: device that gathers.
        release: frees the memory of the shards.
    """

    def __init__(
        self,
        name: str,
        partition: Partition,
        shards: tuple[Tensor, ...],
        dtype: torch.dtype,
        width: int,
        device: torch.device,
        release: Callable[[], None] | None = None,
    ) -> None:
        if len(shards) != partition.shards or any(len(shard) != partition.rows for shard in shards):
            raise ValueError(f"{[len(shard) for shard in shards]} rows, and {partition} has {partition.rows} in each")
        self.name, self.dtype, self.width = name, dtype, width
        self._rows = ShardedRows(shards, partition.rows_per_shard, partition.first_rows, device)
        if self._rows.row_bytes != width * dtype.itemsize:
            raise ValueError(f"rows of {self._rows.row_bytes} bytes, and {width} of {dtype}")
        self._release = release
        self._gather = gather_rows.GATHER_ROWS.select(AUTO, OperationRequest(device, torch.uint8)).function

    def plan(self, block: SampledBlock) -> None:
        """Do nothing: rows are read in place."""

    def gather(self, block: SampledBlock, plan: None, out_NF: Tensor) -> None:
        """See :class:`FeatureStore`."""
        hops = block.shape.hops
        out_NB = as_bytes(out_NF, self.dtype, self.width)
        offsets = block.shape.node_offsets(hops)
        self._gather(self._rows, block.nodes, block.node_counts[hops], offsets, out_NB)

    def close(self) -> None:
        """See :class:`FeatureStore`."""
        if self._rows.device.type == "cuda":
            torch.cuda.synchronize(self._rows.device)
        del self._rows
        if self._release is not None:
            self._release()


def as_bytes(rows_NF: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Return rows as bytes, [N, bytes].

    Raises:
        ValueError: the rows have another dtype or width, or are not contiguous.
    """
    if rows_NF.dtype != dtype or rows_NF.dim() != 2 or rows_NF.shape[1] != width or not rows_NF.is_contiguous():
        raise ValueError(f"rows {tuple(rows_NF.shape)} of {rows_NF.dtype}, and {width} of {dtype} are to be contiguous")
    return rows_NF.view(torch.uint8)
