# mypy: allow-untyped-defs
"""Triton kernels that normalise and rotate queries and keys, and split a product into joined tensors; and back.

A tile is ``rows`` tokens of the queries, keys or values of one head. The two elements of a pair are neighbours in the
registers of a thread. Backward reads the product and the gradients, computes the norm again, and writes the gradient of
the product. A program stays in one head, so that it can add the terms of the gradients of bias and weight in registers.
It writes one partial sum of each, and :mod:`common.ops.tiling` adds these in a fixed order, without atomics.

Bytes at 8,192 rows and 24 heads of 128 in 16 bits: forward 302 MB, 70 us at the 4.3 TB/s of an H200; backward 403 MB,
94 us (values are not read again), to FP8 327 MB, 76 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.flux1.ops.qk_norm_rope import QkvStream
from common.ops.fp8_cast.device import begin, finish_result, load_tile, store_result
from common.ops.fp8_cast.reference import E5M2, SAMPLED_ROWS_OF_COMPUTED, Handover
from common.ops.fp8_cast.triton import output
from common.ops.tile import Tile
from common.ops.tiling import column_sums
from common.ops.triton_support import programs_for, require_contiguous


@triton.jit
def _rotated(x, cos, sin, ROWS: tl.constexpr, D: tl.constexpr):
    """Rotate the pairs of neighbours of a tile (ROWS, D)."""
    even, odd = tl.split(tl.reshape(x, (ROWS, D // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (ROWS, D))


@triton.jit
def _angles(cos_ptr, sin_ptr, position, mask, D: tl.constexpr):
    """Return cosines and sines of the positions of a tile, (ROWS, D / 2) each."""
    offset = position[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    cos = tl.load(cos_ptr + offset, mask=mask[:, None], other=1.0)
    return cos, tl.load(sin_ptr + offset, mask=mask[:, None], other=0.0)


@triton.jit
def _columns(given, head, D, BLOCK_D: tl.constexpr):
    """Return the columns of one head's queries, keys or values, their mask, bias, norm weight, and part (0, 1 or 2).

    ``given``: qkv, bias, weights of queries and keys, cosines, sines, H, tokens of the stream, position of its first
    token, epsilon.
    """
    column, part = tl.arange(0, BLOCK_D), head // given[6]
    weight_ptr = given[2]
    if part == 1:
        weight_ptr = given[3]
    weight = tl.load(weight_ptr + column).to(tl.float32)[None, :]
    column += head * BLOCK_D
    return column, column >= 0, tl.load(given[1] + column).to(tl.float32)[None, :], weight, part


@triton.jit
def _loaded(given, columns, row, R, D: tl.constexpr):
    """Return a tile of the product with its bias, and 1 / rms of its rows, (ROWS, 1)."""
    x = load_tile(given[0], row, columns, R, 3 * given[6] * D) + columns[2]
    return x, 1.0 / tl.sqrt(tl.sum(x * x, 1)[:, None] / D + given[9])


@triton.jit
def qk_norm_rope_forward_kernel(
    given,  # see _columns
    q_ptr, k_ptr, v_ptr,  # (N, L, H, D)
    R, L,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the queries, keys or values of one head for a tile of tokens. Grid (ceil(R / ROWS) * 3 H,)."""
    heads, tokens = given[6], given[7]
    columns = _columns(given, tl.program_id(0) % (3 * heads), D, D)
    row = tl.program_id(0) // (3 * heads) * ROWS + tl.arange(0, ROWS)
    y, rstd = _loaded(given, columns, row, R, D)
    position = given[8] + row % tokens
    part = columns[4]
    if part < 2:
        cos, sin = _angles(given[4], given[5], position, row < R, D)
        y = _rotated(y * rstd * columns[3], cos, sin, ROWS, D)
    pointer = q_ptr
    if part == 1:
        pointer = k_ptr
    if part == 2:
        pointer = v_ptr
    target = (row // tokens).to(tl.int64) * L + position
    offset = target[:, None] * (heads * D) + (columns[0] - part * heads * D)[None, :]
    tl.store(pointer + offset, y.to(pointer.dtype.element_ty), mask=(row < R)[:, None])


@triton.jit
def qk_norm_rope_backward(given, columns, inverse, row, R, D: tl.constexpr):
    """Return the gradient of a tile of the product, and the terms of the weight's gradient.

    ``given``: see :func:`_columns`, then the gradients of queries, keys and values, and the strides of their samples,
    tokens and heads.
    """
    ROWS: tl.constexpr = row.shape[0]
    heads, tokens, part = given[6], given[7], columns[4]
    pointer = given[10]
    if part == 1:
        pointer = given[11]
    if part == 2:
        pointer = given[12]
    n_stride = tl.where(part == 0, given[13], tl.where(part == 1, given[16], given[19]))
    l_stride = tl.where(part == 0, given[14], tl.where(part == 1, given[17], given[20]))
    h_stride = tl.where(part == 0, given[15], tl.where(part == 1, given[18], given[21]))
    position = given[8] + row % tokens
    source = (row // tokens).to(tl.int64) * n_stride + position.to(tl.int64) * l_stride
    first = (part * heads) * D
    head = (columns[0] - first) // D
    offset = source[:, None] + (head.to(tl.int64) * h_stride + columns[0] % D)[None, :]
    dx = tl.load(pointer + offset, mask=(row < R)[:, None], other=0.0).to(tl.float32)
    terms = dx
    if part < 2:
        cos, sin = _angles(given[4], given[5], position, row < R, D)
        dy = _rotated(dx, cos, -sin, ROWS, D)
        x, rstd = _loaded(given, columns, row, R, D)
        normal = x * rstd
        terms = dy * normal
        d_normal = dy * columns[3]
        dx = (d_normal - normal * (tl.sum(d_normal * normal, 1)[:, None] / D)) * rstd
    return ((dx, 0),), ((terms, 0),)


@triton.jit
def qk_norm_rope_backward_kernel(
    given, output,  # inputs of the formula; gradient of the product
    of_bias_ptr,  # (P, 3 H D) fp32: partial gradients of the bias
    of_weights_ptr,  # (P, H, 2, D) fp32: partial gradients of the weights of queries and keys
    R,
    D: tl.constexpr, HEADS: tl.constexpr, SAMPLED_ROWS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the product and partial sums. Grid (P * 3 H,); a program stays in one head."""
    PARTS: tl.constexpr = 3 * HEADS
    known, scale, peak = begin(
        output, 0, given, None, R, D, PARTS, _columns, qk_norm_rope_backward, SAMPLED_ROWS, ROWS, D, GROUP
    )
    columns = _columns(given, tl.program_id(0) % PARTS, D, D)
    share, part = tl.program_id(0) // PARTS, columns[4]
    d_bias = tl.zeros((ROWS, D), tl.float32)
    d_weight = tl.zeros((ROWS, D), tl.float32)
    for tile in tl.range(share, tl.cdiv(R, ROWS), tl.num_programs(0) // PARTS, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        parts, terms = qk_norm_rope_backward(given, columns, None, row, R, D)
        peak = store_result(output, scale, peak, parts, columns, row, R, GROUP)
        d_bias += parts[0][0]
        d_weight += terms[0][0]
    tl.store(of_bias_ptr + share * (PARTS * D) + columns[0], tl.sum(d_bias, 0))
    if part < 2:
        head = tl.program_id(0) % HEADS
        target = ((share * HEADS + head) * 2 + part) * D + tl.arange(0, D)
        tl.store(of_weights_ptr + target, tl.sum(d_weight, 0))
    finish_result(output, known, scale, peak)


TILES: dict[str, Tile] = {
    "forward": Tile(rows=32, warps=4),
    "backward": Tile(rows=32, warps=8, programs=4, stages=2),
    "backward to fp8": Tile(rows=32, warps=8, programs=4, stages=2),
}
"""Tiles by pass. ``rows``: tokens of one head."""


def _given(
    qkv_RF: Tensor, bias_F: Tensor, weights: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], tokens: int,
    first: int, epsilon: float,
) -> tuple[Any, ...]:  # fmt: skip
    heads = qkv_RF.shape[1] // (3 * len(weights[0]))
    return qkv_RF, bias_F, *weights, *angles, heads, tokens, first, epsilon


class _QkNormRope(torch.autograd.Function):
    """Tensors are those of each stream in turn: qkv, bias, q_weight and k_weight."""

    @staticmethod
    def forward(
        ctx: Any, cos_LD2: Tensor, sin_LD2: Tensor, epsilon: float, tokens: list[int],
        handovers: list[Handover | None], *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(cos_LD2, sin_LD2, *tensors)
        ctx.epsilon, ctx.tokens, ctx.handovers = epsilon, tokens, handovers
        qkv_RF, _, weight_D, _ = tensors[:4]
        size, length = len(weight_D), sum(tokens)
        heads, tile = qkv_RF.shape[1] // (3 * size), TILES["forward"]
        shape = (len(qkv_RF) // tokens[0], length, heads, size)
        results = tuple(qkv_RF.new_empty(shape) for _ in range(3))
        first = 0
        for number, own in enumerate(tokens):
            qkv_RF, bias_F, *weights = tensors[4 * number : 4 * number + 4]
            rows = len(qkv_RF)
            qk_norm_rope_forward_kernel[(triton.cdiv(rows, tile.rows) * 3 * heads,)](
                _given(qkv_RF, bias_F, (weights[0], weights[1]), (cos_LD2, sin_LD2), own, first, epsilon), *results,
                rows, length, D=size, ROWS=tile.rows, num_warps=tile.warps,
            )  # fmt: skip
            first += own
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos_LD2, sin_LD2, *tensors = ctx.saved_tensors
        gradients = tuple(each if each.stride(3) == 1 else each.contiguous() for each in gradients)
        given = *gradients, *(stride for each in gradients for stride in each.stride()[:3])
        found: list[Tensor] = []
        first = 0
        for number, (own, handover) in enumerate(zip(ctx.tokens, ctx.handovers, strict=True)):
            qkv_RF, bias_F, *weights = tensors[4 * number : 4 * number + 4]
            inputs = _given(
                qkv_RF, bias_F, (weights[0], weights[1]), (cos_LD2, sin_LD2), own, first, ctx.epsilon
            )  # fmt: skip
            found += _gradients((*inputs, *given), handover)
            first += own
        return None, None, None, None, None, *found


def _gradients(given: tuple[Any, ...], handover: Handover | None) -> tuple[Tensor, ...]:
    """Return the gradients of a stream's product, bias and norm weights. Three launches; only the scale uses atomics.

    Args:
        given: inputs of :func:`qk_norm_rope_backward`.
        handover: receives the gradient of the product in FP8 if it has a scale.
    """
    qkv_RF, bias_F, q_weight_D, k_weight_D = given[:4]
    rows, size, heads = len(qkv_RF), len(q_weight_D), given[6]
    fp8 = None if handover is None else handover.scaling
    tile = TILES["backward" if fp8 is None else "backward to fp8"]
    programs = programs_for(triton.cdiv(rows, tile.rows), tile.programs, qkv_RF.device, 3 * heads)
    written = output(qkv_RF, 3 * heads * size, E5M2, fp8, half=fp8 is None)
    of_bias = qkv_RF.new_empty((programs, 3 * heads * size), dtype=torch.float32)
    of_weights = qkv_RF.new_empty((programs * heads, 2 * size), dtype=torch.float32)
    qk_norm_rope_backward_kernel[(programs * 3 * heads,)](
        given, written, of_bias, of_weights, rows,
        D=size, HEADS=heads, SAMPLED_ROWS=SAMPLED_ROWS_OF_COMPUTED, ROWS=tile.rows, GROUP=min(8, size),
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    in_fp8 = written.fp8(qkv_RF.dtype)
    d_qkv_RF = written.half if handover is None or in_fp8 is None else handover.leave(in_fp8)
    assert d_qkv_RF is not None
    d_q_weight_D, d_k_weight_D = column_sums(of_weights, q_weight_D.dtype).view(2, size).unbind()
    return d_qkv_RF, column_sums(of_bias, bias_F.dtype), d_q_weight_D, d_k_weight_D.to(k_weight_D.dtype)


def qk_norm_rope(
    streams: Sequence[QkvStream], cos_LD2: Tensor, sin_LD2: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, (N, L, H, D) each.

    See :func:`benchmarks.flux1.ops.qk_norm_rope.qk_norm_rope_reference`.

    Raises:
        ValueError: a tensor is not contiguous.
    """
    require_contiguous(cos=cos_LD2, sin=sin_LD2)
    for stream in streams:
        require_contiguous(
            qkv=stream.qkv, bias=stream.bias, q_weight=stream.q_weight, k_weight=stream.k_weight
        )  # fmt: skip
    tensors = [each for stream in streams for each in stream[:4]]
    q_NLHD, k_NLHD, v_NLHD = _QkNormRope.apply(
        cos_LD2, sin_LD2, epsilon, [each.tokens for each in streams], [each.handover for each in streams], *tensors
    )
    return q_NLHD, k_NLHD, v_NLHD
