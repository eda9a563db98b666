# mypy: allow-untyped-defs
"""The dropout mask of :mod:`common.ops.dropout` for all Triton kernels, and plain dropout.

A 32-bit hash decides about two elements: 2i with its low and 2i + 1 with its high half. Kernels with contiguous
elements therefore use ``keep_of_pairs`` (half as many hashes); ``keep_of`` is for any elements. ``THRESHOLD`` is the
dropped fraction in units of 1/65536, 0 for no dropout. Backward computes the mask again.

On an H200 a decision costs about 6 integer operations, 64 of which start per multiprocessor and cycle: 25 million
elements (24,576 tokens, 1,024 features) take 10 us, a third of the time for moving the elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.dropout.reference import scale_of_kept, threshold
from common.ops.random_bits.kernels import site_keys as mask_keys
from common.ops.random_bits.kernels import unfinished_word, word


@triton.jit
def keep_of_pairs(pair, first, second, THRESHOLD: tl.constexpr):
    """Return whether elements 2 * pair and 2 * pair + 1 are kept, interleaved: the last dimension doubles."""
    bits = unfinished_word(pair, first, second)
    return tl.interleave(((bits ^ (bits >> 16)) & 0xFFFF) >= THRESHOLD, bits >= (THRESHOLD << 16))


@triton.jit
def keep_of(index, first, second, THRESHOLD: tl.constexpr):
    """Return whether elements are kept; ``index`` is uint32."""
    bits = word(index >> 1, first, second)
    return ((bits >> ((index & 1) << 4)) & 0xFFFF) >= THRESHOLD


@triton.jit
def keep_of_rows(row_start, WIDTH: tl.constexpr, PAIRS: tl.constexpr, first, second, THRESHOLD: tl.constexpr):
    """Return whether the elements row_start[r] + c of a tile are kept, bool (rows, WIDTH).

    Args:
        row_start: uint32 (rows,), all even if ``PAIRS``.
    """
    if PAIRS:
        pair = (row_start >> 1)[:, None] + tl.arange(0, WIDTH // 2).to(tl.uint32)[None, :]
        return keep_of_pairs(pair, first, second, THRESHOLD)
    else:
        return keep_of(row_start[:, None] + tl.arange(0, WIDTH).to(tl.uint32)[None, :], first, second, THRESHOLD)


@triton.jit(do_not_specialize=["site"])
def dropout_kernel(
    x_ptr,  # (count,)
    y_ptr,  # (count,)
    seed_ptr,  # 0-d int64
    site,
    count,
    THRESHOLD: tl.constexpr,
    INVERSE_KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply dropout to a flat tensor or its gradient. Grid (ceil(count / BLOCK),)."""
    first, second = mask_keys(seed_ptr, site)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    offset = begin + tl.arange(0, BLOCK)
    inside = offset < count
    pair = (begin >> 1).to(tl.uint32) + tl.arange(0, BLOCK // 2).to(tl.uint32)
    keep = keep_of_pairs(pair, first, second, THRESHOLD)
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(keep, x * INVERSE_KEEP, 0.0)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


BLOCK = 4096
WARPS = 8


class Rate(NamedTuple):
    """A dropout probability in the form of kernel arguments.

    Attributes:
        THRESHOLD: dropped fraction in units of 1/65536.
        INVERSE_KEEP: factor of kept elements.
    """

    THRESHOLD: int
    INVERSE_KEEP: float


def rate(p: float) -> Rate:
    """Return the kernel arguments for a dropout probability.

    Raises:
        ValueError: see :func:`common.ops.dropout.reference.threshold`.
    """
    return Rate(threshold(p), scale_of_kept(p))


def _launch(x: Tensor, given: Rate, seed: Tensor, site: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    dropout_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, y, seed, site, x.numel(), **given._asdict(), BLOCK=BLOCK, num_warps=WARPS
    )
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Rate, seed: Tensor, site: int) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.given, ctx.site = given, site
        return _launch(x, given, seed, site)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        return _launch(gradients[0], ctx.given, seed, ctx.site), None, None, None


def dropout(x: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
    """Return kept elements of ``x`` scaled, and zeros elsewhere.

    See :func:`common.ops.dropout.reference.dropout_reference`.
    """
    given = rate(p)
    if given.THRESHOLD == 0 or x.numel() == 0:
        return x
    result: Tensor = _Dropout.apply(x, given, seed, site)
    return result
