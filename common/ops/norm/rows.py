# mypy: allow-untyped-defs
"""Functions that Triton kernels of layer norm over T rows of E features share.

A program holds a few whole rows at a time, in ``BLOCK_E`` columns, the next power of two. The variance is the biased
variance of the row, with epsilon inside the square root (Ba, Kiros, Hinton, arXiv:1607.06450).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_fp32(pointer, offset, mask):
    """Load values as fp32, with 0 for masked elements."""
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def offset_of_rows(row, T, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the int64 element offsets of whole rows, and a mask of the elements that exist."""
    column = tl.arange(0, BLOCK_E)
    return row.to(tl.int64)[:, None] * E + column[None, :], (row < T)[:, None] & (column < E)[None, :]


@triton.jit
def standardised(total, epsilon, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the standardised rows, 0 beyond their end, with their means and 1 / standard deviations."""
    inside = tl.arange(0, BLOCK_E) < E
    mean = tl.sum(total, 1) / E
    centred = tl.where(inside[None, :], total - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / E + epsilon)
    return centred * rstd[:, None], mean, rstd


@triton.jit
def load_moments(moments_ptr, row, T):
    """Load the means and 1 / standard deviations that :func:`store_moments` has stored, (rows, 1) each."""
    mean = tl.load(moments_ptr + row, mask=row < T, other=0.0)[:, None]
    return mean, tl.load(moments_ptr + T + row, mask=row < T, other=0.0)[:, None]


@triton.jit
def store_moments(moments_ptr, mean, rstd, row, T):
    """Store means and 1 / standard deviations of whole rows to fp32 (2, T)."""
    tl.store(moments_ptr + row, mean, mask=row < T)
    tl.store(moments_ptr + T + row, rstd, mask=row < T)


@triton.jit
def standardised_again(total, mean, rstd, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the rows of :func:`standardised`, computed from their moments."""
    return tl.where((tl.arange(0, BLOCK_E) < E)[None, :], (total - mean) * rstd, 0.0)


@triton.jit
def through_norm(d_normal, normal, rstd, E: tl.constexpr):
    """Return the gradient of the input of :func:`standardised`, from the gradient of its result."""
    along = tl.sum(d_normal * normal, 1)[:, None] / E
    return rstd * (d_normal - tl.sum(d_normal, 1)[:, None] / E - normal * along)
