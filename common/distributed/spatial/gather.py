"""Between the layers that split a volume and those that every rank of the group computes whole.

Where a level has too few planes, exchanging halos costs more than it saves; its layers are computed redundantly, by
every rank on the whole volume. Neither way across needs a sum in its backward pass. Every rank runs the redundant part
on the same input, and :func:`own_slab` hands all of them the gradient of the one loss with respect to its whole output,
so each computes the whole gradient, of activations and of weights. What :func:`gather_slabs` then keeps of it, the
rank's own slab, is complete. The weights' gradients are equal on all ranks and have to be averaged over the axis, while
those of the layers that are split are parts of a sum: ``ParameterGroup.replicated_over`` says which is which.

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
    """The whole volume on every rank, channels last; backward keeps the rank's own slab of the gradient. Collective."""
    whole: Tensor = _GatherSlabs.apply(slab_NCDHW, split)
    return whole


def own_slab(whole_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
    """This rank's slab of a volume that all ranks have; backward gathers the gradient. Collective in backward.

    Raises:
        ValueError: the slabs would not be equal.
    """
    slab: Tensor = _OwnSlab.apply(whole_NCDHW, split)
    return slab


def _all_gather(slab_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
    """Slabs joined along D; with channels last and one sample they arrive where they belong."""
    slab_NDHWC = slab_NCDHW.permute(0, 2, 3, 4, 1).contiguous()
    N, D, H, W, C = slab_NDHWC.shape
    gathered = slab_NDHWC.new_empty(split.ranks * N, D, H, W, C)
    dist.all_gather_into_tensor(gathered, slab_NDHWC, group=split.group)
    gathered_RNDHWC = gathered.view(split.ranks, N, D, H, W, C)
    return gathered_RNDHWC.transpose(0, 1).reshape(N, split.ranks * D, H, W, C).permute(0, 4, 1, 2, 3)


def _slab(whole_NCDHW: Tensor, split: VolumeSplit) -> Tensor:
    """A tensor of its own: of several samples a view has gaps, which the layers that follow would each copy away."""
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
