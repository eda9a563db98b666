"""Split of volumes along D into equal slabs, one per rank of a group.

If a level has too few planes, halo exchange costs more than it saves; every rank then computes its layers redundantly
on the whole volume. Neither transition needs a sum in its backward pass: :func:`own_slab` gives all ranks the
gradient of the loss with respect to the whole volume, so each rank computes complete gradients of activations and
weights, and :func:`gather_slabs` keeps the rank's slab of the former. Gradients of redundant weights are equal on all
ranks and must be averaged over the axis; those of split layers must be summed. ``ParameterGroup.replicated_over``
states which applies.

Shapes: N samples, C channels, D H W volume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.distributed.layout import Layout

DEPTH = 2
"""Index of dimension D in NCDHW."""


@dataclass(frozen=True)
class VolumeSplit:
    """Split of volumes along D into equal slabs, in rank order.

    Attributes:
        ranks: number of slabs.
        index: index of this rank's slab, 0 <= index < ranks.
        group: process group of the ranks; None if ranks is 1.
    """

    ranks: int
    index: int
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.ranks:
            raise ValueError(f"slab {self.index} of {self.ranks} does not exist")
        if (self.group is None) != (self.ranks == 1):
            raise ValueError(f"{self.ranks} slabs and {'no group' if self.group is None else 'a group'}")

    @classmethod
    def from_layout(cls, layout: Layout, axis: str = "cp") -> VolumeSplit | None:
        """Return the split over ``axis`` of ``layout``; None if the axis has one rank. Collective."""
        if layout.size(axis) == 1:
            return None
        return cls(layout.size(axis), layout.coordinate(axis), layout.group(axis))

    def gather(self, values: Tensor) -> Tensor:
        """Return a small contiguous tensor of every rank, (ranks, *shape), in the order of the slabs. Collective."""
        gathered = values.new_empty(self.ranks, *values.shape)
        if self.group is None:
            return gathered.copy_(values)
        dist.all_gather_into_tensor(gathered.view(-1), values.view(-1), group=self.group)
        return gathered

    def sum_(self, values: Tensor) -> None:
        """Sum a small contiguous tensor over the ranks, in place. Collective.

        Every rank adds in rank order, so all ranks get the same bits. An all-reduce may add in a different order on
        each rank, and layers that all ranks compute redundantly would diverge.
        """
        if self.group is not None:
            torch.sum(self.gather(values), 0, out=values)

    def slab(self, whole: Tensor, dim: int = DEPTH) -> Tensor:
        """Return this rank's slab of a whole tensor, as a view.

        Args:
            whole: any tensor with the split axis.
            dim: dimension of that axis; that of NCDHW by default. A label of shape NDHW needs 1.

        Raises:
            ValueError: the number of ranks does not divide the number of planes.
        """
        size = whole.shape[dim]
        if size % self.ranks:
            raise ValueError(f"{size} planes cannot be sharded over {self.ranks} ranks in equal slabs")
        thickness = size // self.ranks
        return whole.narrow(dim, self.index * thickness, thickness)


def gather_slabs(slab_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
    """Return the whole volumes (N, C, D, H, W), channels last, from the ranks' slabs of planes. Collective.

    Backward keeps this rank's slab of the gradient.
    """
    whole: Tensor = _GatherSlabs.apply(slab_NCDHW, split)
    return whole


def own_slab(whole_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
    """Return this rank's slab (N, C, D / ranks, H, W) of volumes that all ranks hold.

    Backward gathers the gradient, so it is collective.

    Raises:
        ValueError: the number of ranks does not divide the number of planes.
    """
    slab: Tensor = _OwnSlab.apply(whole_NCDHW, split)
    return slab


def _all_gather(slab_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
    """Return the slabs joined along D; with channels last and one sample, no copy is needed after the gather."""
    slab_NDHWC = slab_NCDHW.permute(0, 2, 3, 4, 1).contiguous()
    N, D, H, W, C = slab_NDHWC.shape
    gathered = slab_NDHWC.new_empty(split.ranks * N, D, H, W, C)
    dist.all_gather_into_tensor(gathered, slab_NDHWC, group=split.group)
    gathered_RNDHWC = gathered.view(split.ranks, N, D, H, W, C)
    return gathered_RNDHWC.transpose(0, 1).reshape(N, split.ranks * D, H, W, C).permute(0, 4, 1, 2, 3)


def _slab(whole_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
    """Return a contiguous copy of the slab. A view of several samples has gaps, and each later layer would copy it."""
    return split.slab(whole_NCDHW).contiguous(memory_format=torch.channels_last_3d)


class _GatherSlabs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slab_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
        ctx.split = split
        return _all_gather(slab_NCDHW, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NCDHW: Tensor) -> tuple[Tensor, None]:
        return _slab(grad_NCDHW, ctx.split), None


class _OwnSlab(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
        ctx.split = split
        return _slab(whole_NCDHW, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NCDHW: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad_NCDHW, ctx.split), None
