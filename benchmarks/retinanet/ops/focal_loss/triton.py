# mypy: allow-untyped-defs
"""Triton kernel for the focal loss of one level: loss and gradients of logits and bias in one pass.

A row is the C = anchors per cell * classes logits of a cell. VECTOR adjacent logits of one anchor are loaded at once.
A period is the number of rows that fills a whole number of blocks best: 2,376 columns in blocks of 1,024 would leave
23 % of the lanes idle, three rows in seven blocks 0.6 %. A program handles one block of the period and loops over
periods, so that a lane always has the same column. The bias gradient is therefore a sum in registers, which is written
once; :mod:`common.ops.tiling` adds the programs' sums in a fixed order.

The pass reads logits and writes their gradient: for 32 pictures, 120,087 anchors and 264 classes in 16 bit these are
4.06 GB, 0.95 ms at 4.26 TB/s on an H200. One exponential and one reciprocal per element take 0.55 ms, at 16 of either
per cycle and multiprocessor. The logarithm of softplus is a polynomial, which avoids a third such operation.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.retinanet.ops.focal_loss import FocalLoss, Scaled, anchors_of_a_cell
from common.ops.tile import Tile
from common.ops.tiling import column_sums
from common.ops.triton_support import programs_for

IGNORED: tl.constexpr = tl.constexpr(-2)
_MINUS_LOG2_E: tl.constexpr = tl.constexpr(-1.4426950408889634)


@triton.jit
def _log1p(e):
    """Return log(1 + e) for e in [0, 1], with an error of at most 3e-7."""
    # The quotient approximates log(1 + e) / e by interpolation at Chebyshev nodes.
    quotient = 0.0434938998 - 0.00837115255 * e
    quotient = -0.106850029 + quotient * e
    quotient = 0.176874767 + quotient * e
    quotient = -0.244747742 + quotient * e
    quotient = 0.332719284 + quotient * e
    quotient = -0.499971745 + quotient * e
    return (0.999999781 + quotient * e) * e


@triton.jit
def _power(s, GAMMA: tl.constexpr):
    """Return s^gamma for s in [0, 1]."""
    if GAMMA == 2.0:
        return s * s
    elif GAMMA == 0.0:
        return tl.full(s.shape, 1.0, tl.float32)
    else:
        return tl.exp2(GAMMA * tl.log2(s))


@triton.jit
def focal_loss_kernel(
    logits_ptr,  # (rows, C)
    bias_ptr,  # (C,)
    class_ptr,  # (N, anchors of the level), rows class_stride apart
    weight_ptr,  # (N,) fp32
    loss_scale_ptr,  # ()
    d_logits_ptr,  # (rows, C)
    partial_ptr,  # (programs, PERIOD, C) fp32
    loss_ptr,  # (programs, blocks) fp32
    rows, class_stride, alpha, others,
    GAMMA: tl.constexpr, CELLS: tl.constexpr, ANCHORS: tl.constexpr, CLASSES: tl.constexpr,
    PERIOD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the logits of a program's blocks, and the program's sums of loss and bias gradient.

    Grid (blocks of a period, programs). ``others`` is 1 - alpha, CELLS the number of cells of a picture.
    """
    vectors_of_row: tl.constexpr = ANCHORS * CLASSES // VECTOR
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, VECTOR)[None, :]
    inside = vector < PERIOD * vectors_of_row
    own_row = vector // vectors_of_row
    column = vector % vectors_of_row * VECTOR
    anchor = column // CLASSES
    own_class = (column % CLASSES)[:, None] + lane
    offset = vector[:, None] * VECTOR + lane
    bias = tl.load(bias_ptr + column[:, None] + lane, mask=inside[:, None], other=0.0).to(tl.float32)
    loss_scale = tl.load(loss_scale_ptr).to(tl.float32)
    column_sums = tl.zeros((BLOCK, VECTOR), tl.float32)
    loss = tl.zeros((BLOCK,), tl.float32)
    for period in tl.range(tl.program_id(1), tl.cdiv(rows, PERIOD), tl.num_programs(1), num_stages=STAGES):
        row = period * PERIOD + own_row
        exists = inside & (row < rows)
        picture = row // CELLS
        position = (row % CELLS * ANCHORS + anchor).to(tl.int64)
        class_of_anchor = tl.load(
            class_ptr + (picture.to(tl.int64) * class_stride + position), mask=exists, other=IGNORED
        ).to(tl.int32)
        counts = class_of_anchor != IGNORED
        weight = tl.where(counts, tl.load(weight_ptr + picture, mask=exists, other=0.0), 0.0)
        start = tl.full((), PERIOD * ANCHORS * CLASSES, tl.int64) * period
        x = tl.load(logits_ptr + start + offset, mask=exists[:, None], other=0.0).to(tl.float32) + bias
        is_own = own_class == class_of_anchor[:, None]

        # y is -x for the anchor's class and x otherwise. s is 1 - p_t and rest is p_t.
        y = tl.where(counts[:, None], tl.where(is_own, -x, x), 0.0)
        e = tl.exp2(tl.abs(y) * _MINUS_LOG2_E)
        share = 1.0 / (1.0 + e)
        s = tl.where(y < 0, e, 1.0) * share
        rest = tl.where(y < 0, 1.0, e) * share
        softplus = tl.maximum(y, 0.0) + _log1p(e)
        common = tl.where(is_own, alpha, others) * weight[:, None] * _power(s, GAMMA)
        loss += tl.sum(common * softplus, 1)
        gradient = tl.where(is_own, -common, common) * (s + GAMMA * softplus * rest) * loss_scale
        column_sums += gradient
        tl.store(d_logits_ptr + start + offset, gradient.to(d_logits_ptr.dtype.element_ty), mask=exists[:, None])
    own_partial = tl.full((), PERIOD * ANCHORS * CLASSES, tl.int64) * tl.program_id(1)
    tl.store(partial_ptr + own_partial + offset, column_sums, mask=inside[:, None])
    tl.store(loss_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(loss, 0))


_VECTOR = 8
"""Maximum number of elements per load: 16 bytes of 16-bit logits."""
_LONGEST_PERIOD = 16


TILES: dict[str, Tile] = {"loss": Tile(vectors=128, warps=4, programs=7, stages=3)}
"""Name of the pass to its tile. ``vectors``: vectors of up to 8 logits per block."""


def period_of(vectors: int, block: int) -> int:
    """Return how many rows of ``vectors`` vectors, 1 to 16, need the fewest vectors per row in whole blocks."""
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
    """Return loss and gradients; see :func:`benchmarks.retinanet.ops.focal_loss.compute_reference`."""
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
    programs = programs_for(triton.cdiv(rows, period), tile.programs, logits_NCHW.device, blocks)

    d_logits_NCHW = torch.empty_like(logits_NCHW, memory_format=torch.channels_last)
    partial = logits_NCHW.new_empty((programs * period, channels), dtype=torch.float32)
    loss = partial.new_empty((programs, blocks))
    focal_loss_kernel[blocks, programs](
        logits_NCHW, bias_C.contiguous(), class_NA, weight_N.contiguous(), loss_scale, d_logits_NCHW, partial, loss,
        rows, class_NA.stride(0), alpha, 1 - alpha,
        GAMMA=float(gamma), CELLS=height * width, ANCHORS=anchors, CLASSES=classes,
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
    """Return the weighted sum of one pyramid level's focal losses, 0-d fp32.

    See :func:`benchmarks.retinanet.ops.focal_loss.focal_loss_reference`. The gradient that backward receives must equal
    ``loss_scale``.
    """
    anchors_of_a_cell(logits_NCHW, class_NA)
    loss: Tensor = FocalLoss.apply(compute, logits_NCHW, bias_C, class_NA, weight_N, alpha, gamma, loss_scale)
    return loss
