"""One axis of a volume dealt in equal slabs to the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.layout import Layout

DEPTH = 2
"""Dimension of D in NCDHW."""


@dataclass(frozen=True)
class VolumeSplit:
    """One axis of a volume dealt in equal slabs to the ranks of a group, rank by rank.

    Attributes:
        ranks: slabs of a volume.
        index: which of them this rank has, 0 <= index < ranks.
        dim: the dimension of NCDHW tensors that is split, 2 (D).
        group: the ranks; None where ranks is 1.
    """

    ranks: int
    index: int
    dim: int = DEPTH
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.ranks:
            raise ValueError(f"slab {self.index} of {self.ranks} does not exist")
        if self.dim != DEPTH:
            raise ValueError(f"dim={self.dim}: volumes are split along D, dimension {DEPTH} of NCDHW")
        if (self.group is None) != (self.ranks == 1):
            raise ValueError(f"{self.ranks} slabs and {'no group' if self.group is None else 'a group'}")

    @classmethod
    def from_layout(cls, layout: Layout, axis: str = "cp", dim: int = DEPTH) -> VolumeSplit | None:
        """The split over ``axis`` of ``layout``; None where the axis has one rank. Collective."""
        if layout.size(axis) == 1:
            return None
        return cls(layout.size(axis), layout.coordinate(axis), dim, layout.group(axis))

    def gather(self, values: Tensor) -> Tensor:
        """A small contiguous tensor of every rank, (ranks, *shape), in the order of the slabs. Collective."""
        gathered = values.new_empty(self.ranks, *values.shape)
        if self.group is None:
            return gathered.copy_(values)
        dist.all_gather_into_tensor(gathered.view(-1), values.view(-1), group=self.group)
        return gathered

    def sum_(self, values: Tensor) -> None:
        """Sum a small contiguous tensor in place over the ranks. Collective.

        Rank by rank, so that every rank gets the same bits: an all-reduce may add in another order on another rank, and
        then layers that all ranks compute alike would drift apart.
        """
        if self.group is not None:
            torch.sum(self.gather(values), 0, out=values)

    def slab(self, whole: Tensor, dim: int | None = None) -> Tensor:
        """This rank's slab of a whole tensor, a view.

        Args:
            whole: any tensor with the split axis.
            dim: where that axis is; None for that of NCDHW. A label of shape NDHW has it at 1.

        Raises:
            ValueError: the slabs would not be equal.
        """
        dim = self.dim if dim is None else dim
        size = whole.shape[dim]
        if size % self.ranks:
            raise ValueError(f"{size} planes cannot be dealt to {self.ranks} ranks in equal slabs")
        thickness = size // self.ranks
        return whole.narrow(dim, self.index * thickness, thickness)
