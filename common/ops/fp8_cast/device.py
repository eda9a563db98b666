# mypy: allow-untyped-defs
"""FP8 with delayed scaling for Triton kernels: what a kernel needs that writes its result in FP8 itself.

Such a kernel runs as a one-dimensional grid of programs that walk over tiles. Every program loads the scale first
(0: unknown, then it takes one by :func:`first_scale` from a sample of its results), rounds with :func:`round_to_fp8`
what it computes, keeps the largest magnitude with :func:`peak_of`, and ends with :func:`finish`, which writes the
inverse of the scale that was used and replaces the scale for the next use.

The maximum has two stages: each program's own, over bit patterns (those of non-negative floats are ordered as integers,
with NaN above infinity), and an atomic maximum of all programs, which is exact and so the same in whatever order they
come. The program that comes last writes the scale: every other one has read the old scale by then, which saves a launch
for each of a layer's results in FP8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.fp8_cast import reference

INFINITY_BITS = tl.constexpr(0x7F800000)
LARGEST_E4M3 = tl.constexpr(448.0)
LARGEST_E5M2 = tl.constexpr(57344.0)
LARGEST_SCALE = tl.constexpr(reference.LARGEST_SCALE)
FIRST_MARGIN = tl.constexpr(reference.FIRST_MARGIN)


@triton.jit
def magnitude_bits(x):
    """Bits of |x| of fp32, as int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def no_peak(ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The maximum of no tile: int32 (ROWS, COLUMNS / GROUP)."""
    return tl.zeros((ROWS, COLUMNS // GROUP), tl.int32)


@triton.jit
def peak_of(peak, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The maximum of ``peak`` and the magnitudes of a tile (ROWS, COLUMNS).

    Args:
        GROUP: neighbours of a row that share a maximum: those that one thread holds, so that they take one register.
    """
    bits = magnitude_bits(x)
    if GROUP > 1:
        bits = tl.max(tl.reshape(bits, (ROWS, COLUMNS // GROUP, GROUP)), 2)
    return tl.maximum(peak, bits)


@triton.jit
def scale_of(amax, otherwise, E5M2: tl.constexpr):
    """The scale for ``amax``; ``otherwise`` where that is 0 or not finite."""
    largest: tl.constexpr = LARGEST_E5M2 if E5M2 else LARGEST_E4M3
    scale = tl.minimum(tl.div_rn(tl.full((), largest, tl.float32), amax), LARGEST_SCALE)
    return tl.where((amax > 0.0) & (amax < float("inf")), scale, otherwise)


@triton.jit
def first_scale(peak, E5M2: tl.constexpr):
    """The scale of a first use, from the maximum over a sample."""
    amax = tl.max(tl.max(peak, 1), 0).to(tl.float32, bitcast=True)
    return scale_of(amax * FIRST_MARGIN, 1.0, E5M2)


@triton.jit
def round_to_fp8(x, scale, E5M2: tl.constexpr):
    """The bytes of ``scale * x`` in FP8, saturated; NaN where x is not finite."""
    largest: tl.constexpr = LARGEST_E5M2 if E5M2 else LARGEST_E4M3
    scaled = tl.clamp(x * scale, -largest, largest)
    # here and not on the bytes, four of which share a register
    scaled = tl.where(magnitude_bits(x) < INFINITY_BITS, scaled, float("nan"))
    if E5M2:
        return scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def widen_e4m3(byte):
    """The numbers of bytes in e4m3fn, fp32."""
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def finish(
    peak,  # of this program
    known,  # the scale as loaded, 0 if unknown
    scale,  # the scale as used
    scale_ptr,  # 0-d fp32, updated
    pending_ptr,  # (2,) int32, zeros: bits of the maximum, programs that are done; zeros again afterwards
    scale_inverse_ptr,  # 0-d fp32, written
    E5M2: tl.constexpr,
    FROZEN: tl.constexpr,
):
    """The end of a program: its share in the scale of the next use; with ``FROZEN`` the scale stays as it is."""
    if tl.program_id(0) == 0:
        tl.store(scale_inverse_ptr, tl.div_rn(1.0, scale))
    if not FROZEN:
        tl.debug_barrier()  # every warp of this program has its scale before another program may replace it
        tl.atomic_max(pending_ptr, tl.max(tl.max(peak, 1), 0))
        if tl.atomic_add(pending_ptr + 1, 1) == tl.num_programs(0) - 1:
            amax = tl.atomic_xchg(pending_ptr, 0).to(tl.float32, bitcast=True)
            tl.store(pending_ptr + 1, 0)
            tl.store(scale_ptr, scale_of(amax, known, E5M2))
