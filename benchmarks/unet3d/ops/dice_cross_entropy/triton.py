"""Dice and cross-entropy with the Triton kernels of :mod:`benchmarks.unet3d.ops.dice_cross_entropy.kernels`.

Everything is queued on the current stream without waiting for the device. Shapes: N samples, V voxels, K = 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.unet3d.ops.dice_cross_entropy import kernels
from benchmarks.unet3d.ops.dice_cross_entropy.reference import TRITON_CLASSES, check_shapes
from common.distributed.spatial.split import VolumeSplit
from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors

TILES: dict[str, Tile] = {
    "forward": Tile(voxels=512, warps=4, programs=8),
    "backward": Tile(voxels=512, warps=4, programs=0),
}
"""Tile by pass. ``voxels``: voxels per block."""

_MOST_PROGRAMS = 1024
_MERGE_SAMPLES = 32


class Layout(NamedTuple):
    """Memory layout of logits: strides in elements between voxels and between classes."""

    voxel_stride: int
    class_stride: int


def layout(logits_NKDHW: Tensor) -> Layout | None:
    """Return the layout of contiguous or channels_last_3d logits; None for others."""
    if logits_NKDHW.is_contiguous(memory_format=torch.channels_last_3d):
        return Layout(TRITON_CLASSES, 1)
    if logits_NKDHW.is_contiguous():
        return Layout(1, logits_NKDHW[0, 0].numel())
    return None


def _launch(tile: Tile, voxels: int) -> tuple[int, dict[str, Any]]:
    """Return the blocks per sample, and the last arguments of the kernel of a pass."""
    block = min(tile.voxels, triton.next_power_of_2(voxels))
    arguments = {"label_stride": 1, "BLOCK": block, "EVEN": voxels % block == 0, "num_warps": tile.warps}
    return triton.cdiv(voxels, block), arguments


def sums(logits_NKDHW: Tensor, label_NDHW: Tensor) -> Tensor:
    """Return the sums over the voxels of each sample, fp32 (N, 8); see ``sums`` in the module of the kernels."""
    samples, voxels = len(logits_NKDHW), label_NDHW[0].numel()
    tile, strides = TILES["forward"], layout(logits_NKDHW)
    assert strides is not None
    blocks, arguments = _launch(tile, voxels)
    room = multiprocessors(logits_NKDHW.device) * tile.programs // samples
    programs = min(blocks, max(1, room), _MOST_PROGRAMS)
    partial = logits_NKDHW.new_empty((samples, programs, kernels.SUMS.value), dtype=torch.float32)
    kernels.dice_partial_sums_kernel[programs, samples](
        logits_NKDHW, label_NDHW, partial, voxels, *strides, **arguments
    )
    result = partial.new_empty((samples, kernels.SUMS.value))
    kernels.dice_sums_kernel[(samples,)](
        partial, result, programs, BLOCK_P=triton.next_power_of_2(programs), num_warps=4
    )
    return result


def loss_of(sums_N8: Tensor, smooth: float, share: float) -> Tensor:
    """Return the loss, 0-d fp32, from sums over whole volumes; ``share`` is 1 / voxels of all samples."""
    loss = sums_N8.new_empty(())
    samples = len(sums_N8)
    block_n = min(triton.next_power_of_2(samples), _MERGE_SAMPLES)
    kernels.dice_loss_kernel[(1,)](sums_N8, loss, samples, smooth, share, BLOCK_N=block_n, num_warps=1)
    return loss


def gradient(
    d_loss: Tensor, logits_NKDHW: Tensor, label_NDHW: Tensor, sums_N8: Tensor, smooth: float, share: float
) -> Tensor:
    """Return the gradient of the logits, in their dtype and memory format."""
    samples, voxels = len(logits_NKDHW), label_NDHW[0].numel()
    strides = layout(logits_NKDHW)
    assert strides is not None
    blocks, arguments = _launch(TILES["backward"], voxels)
    d_logits_NKDHW = torch.empty_like(logits_NKDHW)
    kernels.dice_gradient_kernel[blocks, samples](
        d_loss,
        logits_NKDHW,
        label_NDHW,
        sums_N8,
        d_logits_NKDHW,
        voxels,
        *strides,
        smooth=smooth,
        share=share,
        **arguments,
    )
    return d_logits_NKDHW


class _DiceCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NKDHW: Tensor, label_NDHW: Tensor, smooth: float, split: VolumeSplit | None) -> Tensor:
        if layout(logits_NKDHW) is None:
            logits_NKDHW = logits_NKDHW.contiguous(memory_format=torch.channels_last_3d)
        sums_N8 = sums(logits_NKDHW, label_NDHW)
        if split is not None:
            split.sum_(sums_N8)
        share = 1.0 / (label_NDHW.numel() * (1 if split is None else split.ranks))
        ctx.save_for_backward(logits_NKDHW, label_NDHW, sums_N8)
        ctx.smooth, ctx.share = smooth, share
        return loss_of(sums_N8, smooth, share)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits_NKDHW, label_NDHW, sums_N8 = ctx.saved_tensors
        return gradient(gradients[0], logits_NKDHW, label_NDHW, sums_N8, ctx.smooth, ctx.share), None, None, None


def dice_cross_entropy(
    logits_NKDHW: Tensor, label_NDHW: Tensor, smooth: float, split: VolumeSplit | None = None
) -> Tensor:
    """See :func:`benchmarks.unet3d.ops.dice_cross_entropy.reference.dice_cross_entropy_reference`.

    Labels are not checked: values outside the classes, an error in the reference, count as background here.

    Raises:
        ValueError: labels and logits have different shapes, or there are not three classes.
    """
    check_shapes(logits_NKDHW, label_NDHW)
    if logits_NKDHW.shape[1] != TRITON_CLASSES:
        raise ValueError(f"logits {tuple(logits_NKDHW.shape)}: the kernels are written for {TRITON_CLASSES} classes")
    result: Tensor = _DiceCrossEntropy.apply(logits_NKDHW, label_NDHW.contiguous(), smooth, split)
    return result
