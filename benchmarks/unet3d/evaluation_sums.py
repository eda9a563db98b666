"""Sums of the logits of a volume's windows, and counts of its classes, on the ranks that share the volume.

If several ranks share a volume, or windows are split into slabs, the sums are reduced over those ranks after all
windows have been added. Each rank then counts the classes in a slab of the volume. Axes: D H W voxels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.unet3d.evaluation_volumes import CachedVolume
from benchmarks.unet3d.sliding_window import Origin, Slices, SlidingWindow, add_window, count_classes
from common.distributed.layout import Layout
from common.errors import ConfigError


@dataclass(frozen=True)
class _Sharers:
    """Ranks that each have a part of a volume's sums; ``group`` is None if ``ranks`` is 1."""

    group: dist.ProcessGroup | None
    ranks: int
    index: int

    def sum_slabs(self, sums: Tensor) -> Tensor:
        """Sum contiguous ``sums`` (D, ...) over ranks; return a view of this rank's slab, and make the rest invalid."""
        if self.group is None:
            return sums
        slab = sums.chunk(self.ranks)[self.index]
        dist.reduce_scatter_tensor(slab, sums, group=self.group)
        return slab


class VolumeSums:
    """Sums of one volume at a time, in a reused buffer, and the counts of all volumes.

    Everything is queued on the current stream; only :meth:`all_counts` waits for the device.

    Args:
        window: size and importance of the windows.
        classes: K.
        shares: numbers of dp ranks that can share a volume, divisors of all; :meth:`open` chooses one.
        layout: windows are distributed over dp ranks; each cp rank has a slab of every window.

    Attributes:
        slab_shape: shape of this rank's slab of a window.

    Raises:
        ConfigError: a window has no equal slabs for the cp ranks.
    """

    def __init__(
        self,
        window: SlidingWindow,
        classes: int,
        shares: Sequence[int],
        layout: Layout,
        dtype: torch.dtype,
    ) -> None:
        self._device, self._classes = layout.device, classes
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32

        depth, height, width = window.shape
        cp, index = layout.size("cp"), layout.index("cp")
        if depth % cp:
            raise ConfigError(f"layout.cp={cp} does not divide windows of {depth} planes")
        self.slab_shape = (depth // cp, height, width)
        self._slab_start = index * self.slab_shape[0]
        of_depth, of_height, of_width = window.importance(self._device, self._dtype)
        of_depth = of_depth[self._slab_start : self._slab_start + self.slab_shape[0]]
        self._importance = (of_depth, of_height, of_width)

        self._everyone = layout.group("dp", "cp")
        self._slabs = _Sharers(layout.group("cp"), cp, index)
        self._neighbours = {
            share: _Sharers(layout.subgroup("dp", share), share, layout.index("dp") % share) for share in shares
        }
        self._sharers = [self._slabs]
        self.close()

    def warm_up(self, logits_KDHW: Tensor) -> None:
        """Run every operation and every collective once, on the logits of a synthetic window."""
        sums_DHWK = torch.zeros(*self.slab_shape, self._classes, dtype=self._dtype, device=self._device)
        label_DHW = torch.zeros(self.slab_shape, dtype=torch.uint8, device=self._device)
        counts_K3 = torch.zeros(self._classes, 3, dtype=torch.int64, device=self._device)
        add_window(sums_DHWK, logits_KDHW, self._importance)
        count_classes(sums_DHWK, label_DHW, counts_K3)
        for sharers in (self._slabs, *self._neighbours.values()):
            sharers.sum_slabs(sums_DHWK.new_zeros(sharers.ranks))
        if self._everyone is not None:
            dist.all_reduce(counts_K3, group=self._everyone)

    def open(self, volumes: Sequence[CachedVolume], cases: int, share: int) -> None:
        """Allocate the memory.

        Args:
            volumes: volumes of this rank.
            cases: number of cases of all ranks.
            share: number of neighbouring dp ranks that share the windows of a volume.
        """
        self._sharers = [self._slabs, self._neighbours[share]]
        largest = max((math.prod(self._shape(volume)) for volume in volumes), default=0)
        self._buffer = torch.empty(largest, dtype=self._dtype, device=self._device)
        self._counts = torch.zeros(cases, self._classes, 3, dtype=torch.int64, device=self._device)

    def close(self) -> None:
        """Free the memory of :meth:`open`."""
        self._buffer = torch.empty(0, dtype=self._dtype, device=self._device)
        self._counts = torch.empty(0, self._classes, 3, dtype=torch.int64, device=self._device)
        self._sums_DHWK = self._buffer

    def slices(self, origin: Origin) -> Slices:
        """Return the position of this rank's slab of a window in its volume."""
        first = origin[0] + self._slab_start, *origin[1:]
        d, h, w = (slice(start, start + size) for start, size in zip(first, self.slab_shape, strict=True))
        return d, h, w

    def clear_counts(self) -> None:
        """Set all counts to zero, at the start of an evaluation."""
        self._counts.zero_()

    def begin(self, volume: CachedVolume) -> None:
        """Set the sums to zero, at the start of a volume."""
        shape = self._shape(volume)
        self._sums_DHWK = self._buffer[: math.prod(shape)].view(shape).zero_()

    def add(self, origin: Origin, logits_KDHW: Tensor) -> None:
        """Add this rank's slab of the logits of a window of the current volume."""
        add_window(self._sums_DHWK[self.slices(origin)], logits_KDHW, self._importance)

    def count(self, volume: CachedVolume) -> None:
        """Count the classes of the current volume, or of this rank's slab of it. Collective over the volume's ranks."""
        sums_DHWK, first = self._sums_DHWK, 0
        for sharers in self._sharers:
            sums_DHWK = sharers.sum_slabs(sums_DHWK)
            first += sharers.index * len(sums_DHWK)
        inside_D, inside_H, inside_W = volume.geometry.inside
        begin, end = max(first, inside_D.start), min(first + len(sums_DHWK), inside_D.stop)
        if begin < end:
            scored_DHWK = sums_DHWK[begin - first : end - first, inside_H, inside_W]
            label_DHW = volume.label[begin - inside_D.start : end - inside_D.start]
            count_classes(scored_DHWK, label_DHW, self._counts[volume.index])

    def all_counts(self) -> list[list[list[int]]]:
        """Return counts (case, class, column) over all ranks; columns as in :mod:`benchmarks.unet3d.sliding_window`."""
        if self._everyone is not None:
            dist.all_reduce(self._counts, group=self._everyone)
        counts: list[list[list[int]]] = self._counts.tolist()
        return counts

    def _shape(self, volume: CachedVolume) -> tuple[int, int, int, int]:
        """Return the shape of a volume's sums; the number of planes is rounded up to a multiple of its ranks."""
        depth, height, width = volume.geometry.padded_shape
        ranks = math.prod(sharers.ranks for sharers in self._sharers)
        return math.ceil(depth / ranks) * ranks, height, width, self._classes
