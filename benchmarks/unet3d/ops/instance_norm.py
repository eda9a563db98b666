"""Instance normalisation with scale and shift, then ReLU: what follows every 3x3x3 convolution of the network.

Mean and variance (biased) are those of one channel of one sample over its whole volume, in training and in evaluation
alike: there are no running statistics (Ulyanov et al., arXiv:1607.08022). Sums over two million voxels are taken about
the mean, never as E[x^2] - E[x]^2: convolutions without bias leave means that are large next to the deviation.

The result is returned twice, so that the next block and a skip connection have one each: backward then gets their two
gradients, and adds them where it reads them. Where there is one reader, the other result is left alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed.spatial.split import VolumeSplit
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported, widen

_VOLUME = (2, 3, 4)


class _SumOverSplit(torch.autograd.Function):
    """Sum over the ranks of a split; so is the gradient, since the loss depends on the sum through every slab."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, split: VolumeSplit) -> Tensor:
        ctx.split = split
        total = value.clone()
        split.sum_(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.split.sum_(total)
        return total, None


def whole_volume(x_NCDHW: Tensor, split: VolumeSplit | None) -> int:
    """Voxels of a sample's whole volume.

    Raises:
        ValueError: it has a single voxel, which has no variance.
    """
    voxels = x_NCDHW[0, 0].numel() * (1 if split is None else split.ranks)
    if voxels == 1:
        raise ValueError(f"instance norm over a single voxel, input {tuple(x_NCDHW.shape)}: the volume is too small")
    return voxels


def instance_norm_relu_plain(
    x_NCDHW: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float, split: VolumeSplit | None = None
) -> tuple[Tensor, Tensor]:
    """``relu((x - mean) / sqrt(variance + epsilon) * weight + bias)``. Plain version.

    Args:
        x_NCDHW: input; this rank's slab where the volume is split.
        weight_C, bias_C: scale and shift, of the input's dtype or wider. Their gradients are those of the slab, which
            sum over the ranks to the whole, as for every other parameter.
        epsilon: added to the variance.
        split: ranks that share each volume.

    Returns:
        The same values twice, shape, dtype and memory format of ``x_NCDHW``: one for each of two readers. Neither may
        be changed in place.

    Raises:
        ValueError: the whole volume has a single voxel.
    """
    voxels = whole_volume(x_NCDHW, split)

    def mean(value: Tensor) -> Tensor:
        total = value.sum(_VOLUME, keepdim=True)
        return (total if split is None else _SumOverSplit.apply(total, split)) / voxels

    wide = widen(x_NCDHW)
    centred = wide - mean(wide)
    scale = torch.rsqrt(mean(centred.square()) + epsilon) * weight_C.to(wide.dtype).view(1, -1, 1, 1, 1)
    y_NCDHW = F.relu(centred * scale + bias_C.to(wide.dtype).view(1, -1, 1, 1, 1)).to(x_NCDHW.dtype)
    return y_NCDHW, y_NCDHW


def instance_norm_relu_torch(
    x_NCDHW: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float, split: VolumeSplit | None = None
) -> tuple[Tensor, Tensor]:
    """PyTorch's instance norm and ReLU, which know no split: split volumes take the plain version, which this equals.

    Arguments, result and errors are those of :func:`instance_norm_relu_plain`.
    """
    if split is not None and split.ranks > 1:
        return instance_norm_relu_plain(x_NCDHW, weight_C, bias_C, epsilon, split)
    whole_volume(x_NCDHW, None)
    y_NCDHW = F.relu(F.instance_norm(x_NCDHW, weight=weight_C, bias=bias_C, eps=epsilon))
    # PyTorch's result is NCDHW in memory, whatever the input was
    channels_last = x_NCDHW.is_contiguous(memory_format=torch.channels_last_3d) and not x_NCDHW.is_contiguous()
    if channels_last:
        y_NCDHW = y_NCDHW.contiguous(memory_format=torch.channels_last_3d)
    return y_NCDHW, y_NCDHW


def _instance_norm_relu_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    # triton is imported only where it is used
    from benchmarks.unet3d.ops.instance_norm_triton import instance_norm_relu

    return instance_norm_relu(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _instance_norm_relu_triton, triton_unsupported),
    "torch": Implementation("torch", instance_norm_relu_torch, always),
    "plain": Implementation("plain", instance_norm_relu_plain, always),
}
"""Signature: ``instance_norm_relu(x_NCDHW, weight_C, bias_C, epsilon, split=None)``, which returns the result twice; a
request's channels are C."""
