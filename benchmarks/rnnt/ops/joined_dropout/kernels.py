# mypy: allow-untyped-defs
"""The kernel of :mod:`benchmarks.rnnt.ops.joined_dropout`, for both directions."""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.dropout.kernels import keep_of_pairs, mask_keys


@triton.jit(do_not_specialize=["site", "frames"])
def joined_dropout_kernel(
    x_ptr,  # (T, B, H) contiguous
    y_ptr,  # (S, B, 2 H) contiguous
    seed_ptr,  # 0-d int64
    site,
    frames,  # T
    size,  # B * H, even
    H: tl.constexpr,
    JOIN: tl.constexpr,
    THRESHOLD: tl.constexpr,
    INVERSE_KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``y`` of ``x``, or with ``JOIN`` false ``x`` of ``y``, as gradients go. Grid (size / BLOCK, 2 S or T)."""
    frame = tl.program_id(1)
    begin = tl.program_id(0) * BLOCK
    offset = begin + tl.arange(0, BLOCK)
    apart = frame.to(tl.int64) * size + offset
    row = offset // H
    together = (frame // 2).to(tl.int64) * 2 * size + offset + row * H + (frame % 2) * H
    inside = offset < size
    real = offset < tl.where(frame < frames, size, 0)
    if JOIN:
        value = tl.load(x_ptr + apart, mask=real, other=0.0).to(tl.float32)
    else:
        value = tl.load(y_ptr + together, mask=real, other=0.0).to(tl.float32)
    if THRESHOLD > 0:
        first, second = mask_keys(seed_ptr, site)
        pair = ((frame.to(tl.int64) * size + begin) >> 1).to(tl.uint32) + tl.arange(0, BLOCK // 2).to(tl.uint32)
        value = tl.where(keep_of_pairs(pair, first, second, THRESHOLD), value * INVERSE_KEEP, 0.0)
    if JOIN:
        tl.store(y_ptr + together, value.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(x_ptr + apart, value.to(x_ptr.dtype.element_ty), mask=real)
