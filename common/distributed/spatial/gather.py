"""Transition between layers on slabs and layers that every rank of the group computes on the whole volume.

If a level has too few planes, halo exchange costs more than it saves; every rank then computes its layers redundantly
on the whole volume. Neither transition needs a sum in its backward pass: :func:`own_slab` gives all ranks the
gradient of the loss with respect to the whole volume, so each rank computes complete gradients of activations and
weights, and :func:`gather_slabs` keeps the rank's slab of the former. Gradients of redundant weights are equal on all
ranks and must be averaged over the axis; those of split layers must be summed. ``ParameterGroup.replicated_over``
states which applies.

Shapes: N samples, C channels, D H W volume.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.distributed.spatial.split import VolumeSplit


def gather_slabs(slab_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
    """Return the whole volume, channels last; backward keeps this rank's slab of the gradient. Collective."""
    whole: Tensor = _GatherSlabs.apply(slab_NCDHW, split)
    return whole


def own_slab(whole_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
    """Return this rank's slab of a volume that all ranks hold; backward gathers the gradient. Collective in backward.

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
