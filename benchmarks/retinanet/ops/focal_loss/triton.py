"""Focal loss with the Triton kernel of :mod:`benchmarks.retinanet.ops.focal_loss.kernels`.

Nothing waits for the device. Shapes: N pictures, C channels, H W height and width of a level, A anchors of a level.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from benchmarks.retinanet.ops.focal_loss import kernels
from benchmarks.retinanet.ops.focal_loss.reference import FocalLoss, Scaled, anchors_of_a_cell
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import multiprocessors

_VECTOR = 8
"""Maximum number of elements per load: 16 bytes of 16-bit logits."""
_LONGEST_PERIOD = 16


TILES: dict[str, Tile] = {"loss": Tile(vectors=128, warps=4, programs=7, stages=3)}
"""Name of the pass to its tile. ``vectors``: vectors of up to 8 logits per block."""


def period_of(vectors: int, block: int) -> int:
    """Return how many rows of ``vectors`` vectors fill a whole number of blocks best; the smallest such number."""
    return min(range(1, _LONGEST_PERIOD + 1), key=lambda rows: triton.cdiv(rows * vectors, block) * block / rows)


def compute(
    logits_NCHW: Tensor,
    bias_C: Tensor,
    class_NA: Tensor,
    weight_N: Tensor,
    alpha: float,
    gamma: float,
    loss_scale: Tensor,
) -> Scaled:
    """Return loss and gradients; see :func:`benchmarks.retinanet.ops.focal_loss.reference.compute_reference`."""
    pictures, channels, height, width = logits_NCHW.shape
    anchors = anchors_of_a_cell(logits_NCHW, class_NA)
    classes, rows = channels // anchors, pictures * height * width
    if class_NA.stride(1) != 1:
        class_NA = class_NA.contiguous()
    tile, vector = TILES["loss"], math.gcd(classes, _VECTOR)
    vectors = channels // vector
    block = min(tile.vectors, triton.next_power_of_2(vectors))
    period = period_of(vectors, block)
    blocks = triton.cdiv(period * vectors, block)
    room = max(1, multiprocessors(logits_NCHW.device) * tile.programs // blocks)
    programs = min(triton.cdiv(rows, period), room)

    d_logits_NCHW = torch.empty_like(logits_NCHW, memory_format=torch.channels_last)
    partial = logits_NCHW.new_empty((programs * period, channels), dtype=torch.float32)
    loss = partial.new_empty((programs, blocks))
    kernels.focal_loss_kernel[blocks, programs](
        logits_NCHW, bias_C.contiguous(), class_NA, weight_N.contiguous(), loss_scale, d_logits_NCHW, partial, loss,
        rows, class_NA.stride(0), alpha, 1 - alpha,
        GAMMA=float(gamma), PLACES=height * width, ANCHORS=anchors, CLASSES=classes,
        PERIOD=period, VECTOR=vector, BLOCK=block, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return Scaled(loss.sum(), d_logits_NCHW, column_sums(partial, torch.float32))


def focal_loss(
    logits_NCHW: Tensor,
    bias_C: Tensor,
    class_NA: Tensor,
    weight_N: Tensor,
    alpha: float,
    gamma: float,
    loss_scale: Tensor,
) -> Tensor:
    """Triton implementation; see :func:`benchmarks.retinanet.ops.focal_loss.reference.focal_loss_reference`."""
    anchors_of_a_cell(logits_NCHW, class_NA)
    loss: Tensor = FocalLoss.apply(compute, logits_NCHW, bias_C, class_NA, weight_N, alpha, gamma, loss_scale)
    return loss
