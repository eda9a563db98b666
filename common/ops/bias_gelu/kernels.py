# mypy: allow-untyped-defs
"""Triton kernels of tanh GELU after a bias, over T rows of F features.

Forward reads x and writes y; backward reads dy and x and writes dx. The bias gradient, the column sums of dx, is
two-level: a program owns ``BLOCK_F`` columns, adds up its tiles element by element and their rows once, at its end (a
sum over rows crosses warps: for every tile it takes four times as long as all else), and writes one partial sum, which
:mod:`common.ops.tiling.column_sums` adds in a fixed order.

With s = sigmoid(2 u) and u = sqrt(2 / pi) (z + 0.044715 z^3), ``0.5 z (1 + tanh u)`` is ``z s``, and its derivative is
``s + z s (1 - s) 2 u'``.

On an H200 at 24,576 tokens, F = 4096, 16 bit: forward 403 MB, 94 us at 4.3 TB/s; backward 604 MB, 140 us. One
exponential and one reciprocal an element, 16 of either a cycle and multiprocessor, take 55 us.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TWICE_SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(1.5957691216057308)
_CUBIC: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def _gate(z):
    """sigmoid(2 u)."""
    return 1.0 / (1.0 + tl.exp(-(z * _TWICE_SQRT_2_OVER_PI) * (1.0 + z * z * _CUBIC)))


@triton.jit
def _tile(index, column, T, F, BLOCK_T: tl.constexpr):
    """Place and mask of a tile."""
    row = tl.full((), BLOCK_T, tl.int64) * index + tl.arange(0, BLOCK_T)
    return row[:, None] * F + column[None, :], (row < T)[:, None] & (column < F)[None, :]


@triton.jit
def bias_gelu_forward_kernel(
    x_ptr,  # (T, F)
    bias_ptr,  # (F,)
    y_ptr,  # (T, F)
    T, F,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Grid (F / BLOCK_F * T / BLOCK_T,): a grid's other dimensions end at 65,535, which rows alone can exceed."""
    column_blocks = tl.cdiv(F, BLOCK_F)
    column = tl.program_id(0) % column_blocks * BLOCK_F + tl.arange(0, BLOCK_F)
    place, mask = _tile(tl.program_id(0) // column_blocks, column, T, F, BLOCK_T)
    bias = tl.load(bias_ptr + column, mask=column < F, other=0.0).to(tl.float32)
    z = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    tl.store(y_ptr + place, (z * _gate(z)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bias_gelu_backward_kernel(
    dy_ptr,  # (T, F)
    x_ptr,  # (T, F)
    bias_ptr,  # (F,)
    dx_ptr,  # (T, F)
    partial_ptr,  # (programs, F) fp32
    T, F,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Grid (F / BLOCK_F, programs); every program visits each programs-th tile of its columns."""
    column = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    bias = tl.load(bias_ptr + column, mask=column < F, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for index in range(tl.program_id(1), tl.cdiv(T, BLOCK_T), tl.num_programs(1)):
        place, mask = _tile(index, column, T, F, BLOCK_T)
        dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        gate = _gate(z)
        slope = (1.0 + z * z * (3.0 * _CUBIC)) * _TWICE_SQRT_2_OVER_PI
        dx = dy * gate * (1.0 + z * (1.0 - gate) * slope)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        total += dx
    tl.store(partial_ptr + tl.program_id(1) * F + column, tl.sum(total, 0), mask=column < F)
