# mypy: allow-untyped-defs
"""Triton kernels of the Dice and cross-entropy loss over N samples of V voxels and three classes.

Forward reads logits and labels once; each program keeps seven sums in registers and writes them at its end. Two small
kernels compute the loss from them: one with a program per sample, one with a single program. Backward reads logits
and labels again and writes the gradient; probabilities are never stored. Both passes are memory-bound: with 7 samples
of 128^3 voxels in 16 bit, 103 MB forward and 191 MB backward, 24 and 44 us at 4.3 TB/s on an H200.

Logits are addressed by strides, so they may be (N, V, 3) or (N, 3, V) in memory. With (N, V, 3), the three loads of a
voxel touch the same cache lines, and L1 serves the second and third. Labels have a stride of 1 that the compiler must
not know. Otherwise it would give each thread several adjacent labels and their voxels, and a warp's load of logits
would touch four times as many cache lines.

``sums`` is (N, 8) fp32: cross-entropy; p t of classes 1 and 2; p of both; t of both; and 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.unet3d.ops.dice_cross_entropy import TRITON_CLASSES, check_shapes
from common.distributed.spatial.split import VolumeSplit
from common.ops.tile import Tile
from common.ops.triton_support import programs_for

SUMS: tl.constexpr = tl.constexpr(8)
USED: tl.constexpr = tl.constexpr(7)
FOREGROUND: tl.constexpr = tl.constexpr(2)
NONE: tl.constexpr = tl.constexpr(255)


@triton.jit
def _load(logits_ptr, label_ptr, voxel, V, voxel_stride, class_stride, label_stride, EVEN: tl.constexpr):
    """Load fp32 logits and labels of a sample's voxels; the label is NONE where the voxel does not exist."""
    voxel_ptr = logits_ptr + voxel * voxel_stride
    if EVEN:
        label = tl.load(label_ptr + voxel * label_stride)
        x0 = tl.load(voxel_ptr)
        x1 = tl.load(voxel_ptr + class_stride)
        x2 = tl.load(voxel_ptr + 2 * class_stride)
    else:
        inside = voxel < V
        label = tl.load(label_ptr + voxel * label_stride, mask=inside, other=NONE)
        x0 = tl.load(voxel_ptr, mask=inside, other=0.0)
        x1 = tl.load(voxel_ptr + class_stride, mask=inside, other=0.0)
        x2 = tl.load(voxel_ptr + 2 * class_stride, mask=inside, other=0.0)
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), label.to(tl.int32)


@triton.jit
def _softmax(x0, x1, x2):
    """Return the probabilities of the three classes, and the logarithm of the sum of exponentials."""
    largest = tl.maximum(tl.maximum(x0, x1), x2)
    e0, e1, e2 = tl.exp(x0 - largest), tl.exp(x1 - largest), tl.exp(x2 - largest)
    total = e0 + e1 + e2
    share = 1.0 / total
    return e0 * share, e1 * share, e2 * share, largest + tl.log(total)


@triton.jit(do_not_specialize=["label_stride"])
def dice_partial_sums_kernel(
    logits_ptr,  # (N, V, 3) or (N, 3, V)
    label_ptr,  # (N, V) uint8
    partial_ptr,  # (N, programs, 8) fp32, of which 7 are written
    V, voxel_stride, class_stride, label_stride,
    BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write ``sums`` over the voxels of each program. Grid (programs, N)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    entropy = tl.zeros((BLOCK,), tl.float32)
    both1, both2 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    predicted1, predicted2 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    labelled1, labelled2 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    start = tl.program_id(1).to(tl.int64) * V
    for index in range(program, tl.cdiv(V, BLOCK), programs):
        voxel = index * BLOCK + tl.arange(0, BLOCK)
        x0, x1, x2, label = _load(
            logits_ptr + start * 3, label_ptr + start, voxel, V, voxel_stride, class_stride, label_stride, EVEN
        )
        _, p1, p2, logarithm = _softmax(x0, x1, x2)
        is1, is2 = label == 1, label == 2
        loss = logarithm - tl.where(is1, x1, tl.where(is2, x2, x0))
        if not EVEN:
            inside = voxel < V
            loss = tl.where(inside, loss, 0.0)
            p1 = tl.where(inside, p1, 0.0)
            p2 = tl.where(inside, p2, 0.0)
        entropy += loss
        both1 += tl.where(is1, p1, 0.0)
        both2 += tl.where(is2, p2, 0.0)
        predicted1 += p1
        predicted2 += p2
        labelled1 += tl.where(is1, 1.0, 0.0)
        labelled2 += tl.where(is2, 1.0, 0.0)
    target_ptr = partial_ptr + (tl.program_id(1) * programs + program) * SUMS
    tl.store(target_ptr, tl.sum(entropy, 0))
    tl.store(target_ptr + 1, tl.sum(both1, 0))
    tl.store(target_ptr + 2, tl.sum(both2, 0))
    tl.store(target_ptr + 3, tl.sum(predicted1, 0))
    tl.store(target_ptr + 4, tl.sum(predicted2, 0))
    tl.store(target_ptr + 5, tl.sum(labelled1, 0))
    tl.store(target_ptr + 6, tl.sum(labelled2, 0))


@triton.jit
def dice_sums_kernel(
    partial_ptr,  # (N, programs, 8) fp32
    sums_ptr,  # (N, 8) fp32
    programs,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write ``sums`` of a sample, added in a fixed order. Grid (N,), BLOCK_P >= programs."""
    program, which = tl.arange(0, BLOCK_P), tl.arange(0, SUMS)
    offset = (tl.program_id(0) * programs + program)[:, None] * SUMS + which[None, :]
    mask = (program < programs)[:, None] & (which < USED)[None, :]
    tl.store(sums_ptr + tl.program_id(0) * SUMS + which, tl.sum(tl.load(partial_ptr + offset, mask=mask, other=0.0), 0))


@triton.jit
def _dice(sums_ptr, sample, inside, foreground, smooth):
    """Return Dice and its denominator of foreground class 0 or 1, for one or several samples."""
    class_ptr = sums_ptr + sample * SUMS + 1 + foreground
    both = tl.load(class_ptr, mask=inside, other=0.0)
    predicted = tl.load(class_ptr + FOREGROUND, mask=inside, other=0.0)
    labelled = tl.load(class_ptr + 2 * FOREGROUND, mask=inside, other=0.0)
    denominator = predicted + labelled + smooth
    return (2.0 * both + smooth) / denominator, denominator


@triton.jit
def dice_loss_kernel(
    sums_ptr,  # (N, 8) fp32, of whole volumes
    loss_ptr,  # () fp32
    N, smooth, share,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the loss; ``share`` is 1 / voxels of all samples. Grid (1,)."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        sample = start + tl.arange(0, BLOCK_N)
        inside = sample < N
        dice1, _ = _dice(sums_ptr, sample, inside, 0, smooth)
        dice2, _ = _dice(sums_ptr, sample, inside, 1, smooth)
        entropy = tl.load(sums_ptr + sample * SUMS, mask=inside, other=0.0) * share
        dice_loss = ((1.0 - dice1) + (1.0 - dice2)) / (FOREGROUND * N)
        total += tl.where(inside, entropy + dice_loss, 0.0)
    tl.store(loss_ptr, 0.5 * tl.sum(total, 0))


@triton.jit(do_not_specialize=["label_stride"])
def dice_gradient_kernel(
    d_loss_ptr,  # () fp32
    logits_ptr,  # (N, V, 3) or (N, 3, V)
    label_ptr,  # (N, V) uint8
    sums_ptr,  # (N, 8) fp32, of whole volumes
    d_logits_ptr,  # like the logits
    V, voxel_stride, class_stride, label_stride, smooth, share,
    BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write ``p_k (g_k - sum p g) + (p_k - t_k) share / 2`` times d_loss, g = d loss / d p. Grid (blocks, N).

    With dice = (2 I + smooth) / D for a foreground class, g = -(2 t - dice) / D / (4 N); for the background it is 0.
    """
    d_loss = tl.load(d_loss_ptr).to(tl.float32)
    sample = tl.program_id(1)
    dice1, denominator1 = _dice(sums_ptr, sample, True, 0, smooth)
    dice2, denominator2 = _dice(sums_ptr, sample, True, 1, smooth)
    weight = -0.5 * d_loss / (FOREGROUND * tl.num_programs(1))
    slope1, slope2 = weight / denominator1, weight / denominator2
    entropy = 0.5 * d_loss * share
    dtype: tl.constexpr = d_logits_ptr.dtype.element_ty
    start = sample.to(tl.int64) * V
    voxel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x0, x1, x2, label = _load(
        logits_ptr + start * 3, label_ptr + start, voxel, V, voxel_stride, class_stride, label_stride, EVEN
    )
    p0, p1, p2, _ = _softmax(x0, x1, x2)
    t1, t2 = tl.where(label == 1, 1.0, 0.0), tl.where(label == 2, 1.0, 0.0)
    g1, g2 = (2.0 * t1 - dice1) * slope1, (2.0 * t2 - dice2) * slope2
    mean = p1 * g1 + p2 * g2
    d0 = (p0 - (1.0 - t1 - t2)) * entropy - p0 * mean
    d1 = (p1 - t1) * entropy + p1 * (g1 - mean)
    d2 = (p2 - t2) * entropy + p2 * (g2 - mean)
    target_ptr = d_logits_ptr + start * 3 + voxel * voxel_stride
    if EVEN:
        tl.store(target_ptr, d0.to(dtype))
        tl.store(target_ptr + class_stride, d1.to(dtype))
        tl.store(target_ptr + 2 * class_stride, d2.to(dtype))
    else:
        inside = voxel < V
        tl.store(target_ptr, d0.to(dtype), mask=inside)
        tl.store(target_ptr + class_stride, d1.to(dtype), mask=inside)
        tl.store(target_ptr + 2 * class_stride, d2.to(dtype), mask=inside)


TILES: dict[str, Tile] = {
    "forward": Tile(voxels=512, warps=4, programs=8),
    "backward": Tile(voxels=512, warps=4, programs=0),
}
"""Tile by pass. ``voxels``: voxels per block."""

_MOST_PROGRAMS = 1024
_MERGE_SAMPLES = 32


def strides_of(logits_NKDHW: Tensor) -> tuple[int, int] | None:
    """Return the elements between voxels and between classes of contiguous or channels_last_3d logits; else None."""
    if logits_NKDHW.is_contiguous(memory_format=torch.channels_last_3d):
        return TRITON_CLASSES, 1
    if logits_NKDHW.is_contiguous():
        return 1, logits_NKDHW[0, 0].numel()
    return None


def _launch(tile: Tile, voxels: int) -> tuple[int, dict[str, Any]]:
    """Return the blocks per sample, and the last arguments of the kernel of a pass."""
    block = min(tile.voxels, triton.next_power_of_2(voxels))
    arguments = {"label_stride": 1, "BLOCK": block, "EVEN": voxels % block == 0, "num_warps": tile.warps}
    return triton.cdiv(voxels, block), arguments


def sums(logits_NKDHW: Tensor, label_NDHW: Tensor) -> Tensor:
    """Return the sums over the voxels of each sample, fp32 (N, 8); see ``sums`` in the module of the kernels."""
    samples, voxels = len(logits_NKDHW), label_NDHW[0].numel()
    tile, strides = TILES["forward"], strides_of(logits_NKDHW)
    assert strides is not None
    blocks, arguments = _launch(tile, voxels)
    programs = min(programs_for(blocks, tile.programs, logits_NKDHW.device, samples), _MOST_PROGRAMS)
    partial = logits_NKDHW.new_empty((samples, programs, SUMS.value), dtype=torch.float32)
    dice_partial_sums_kernel[programs, samples](logits_NKDHW, label_NDHW, partial, voxels, *strides, **arguments)
    result = partial.new_empty((samples, SUMS.value))
    dice_sums_kernel[(samples,)](partial, result, programs, BLOCK_P=triton.next_power_of_2(programs), num_warps=4)
    return result


def loss_of(sums_N8: Tensor, smooth: float, share: float) -> Tensor:
    """Return the loss, 0-d fp32, from sums over whole volumes.

    Args:
        smooth: added to numerator and denominator of the Dice coefficient.
        share: 1 / number of voxels of all samples.
    """
    loss = sums_N8.new_empty(())
    samples = len(sums_N8)
    block_n = min(triton.next_power_of_2(samples), _MERGE_SAMPLES)
    dice_loss_kernel[(1,)](sums_N8, loss, samples, smooth, share, BLOCK_N=block_n, num_warps=1)
    return loss


def gradient(
    d_loss: Tensor, logits_NKDHW: Tensor, label_NDHW: Tensor, sums_N8: Tensor, smooth: float, share: float
) -> Tensor:
    """Return the gradient of the logits, in their shape, dtype and memory format.

    Args:
        sums_N8: sums over whole volumes, from the forward pass.
        smooth, share: as in :func:`loss_of`.
    """
    samples, voxels = len(logits_NKDHW), label_NDHW[0].numel()
    strides = strides_of(logits_NKDHW)
    assert strides is not None
    blocks, arguments = _launch(TILES["backward"], voxels)
    d_logits_NKDHW = torch.empty_like(logits_NKDHW)
    dice_gradient_kernel[blocks, samples](
        d_loss, logits_NKDHW, label_NDHW, sums_N8, d_logits_NKDHW, voxels, *strides, smooth=smooth, share=share,
        **arguments,
    )  # fmt: skip
    return d_logits_NKDHW


class _DiceCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NKDHW: Tensor, label_NDHW: Tensor, smooth: float, split: VolumeSplit | None) -> Tensor:
        if strides_of(logits_NKDHW) is None:
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
    """Return the mean loss over the samples, 0-d fp32.

    See :func:`benchmarks.unet3d.ops.dice_cross_entropy.dice_cross_entropy_reference`. Labels are not checked: values
    outside the classes, an error in the reference, count as background here.

    Raises:
        ValueError: labels and logits have different shapes, or there are not three classes.
    """
    check_shapes(logits_NKDHW, label_NDHW)
    if logits_NKDHW.shape[1] != TRITON_CLASSES:
        raise ValueError(f"logits {tuple(logits_NKDHW.shape)}: the kernels are written for {TRITON_CLASSES} classes")
    result: Tensor = _DiceCrossEntropy.apply(logits_NKDHW, label_NDHW.contiguous(), smooth, split)
    return result
