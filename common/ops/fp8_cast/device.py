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


@triton.jit
def load_tile(pointer, row, columns, T, width, inverse=None):
    """Rows and columns of a tensor (T, ``width``), fp32; 0 where there are none. In FP8 it has an ``inverse``."""
    mask = (row < T)[:, None] & columns[1][None, :]
    place = row.to(tl.int64)[:, None] * width + columns[0][None, :]
    x = tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)
    if inverse is not None:
        x *= inverse
    return x


@triton.jit
def block_of_columns(given, block, F, BLOCK_F: tl.constexpr):
    """Columns of a block, and which exist: ``COLUMNS`` of a formula that needs no more of a block."""
    column = block * BLOCK_F + tl.arange(0, BLOCK_F)
    return column, column < F


@triton.jit
def _largest(peak, parts, GROUP: tl.constexpr):
    for number in tl.static_range(len(parts)):
        x = parts[number][0]
        peak = peak_of(peak, x, x.shape[0], x.shape[1], GROUP)
    return peak


@triton.jit
def begin(
    output, result: tl.constexpr, given, inverse, T, F, BLOCKS, COLUMNS: tl.constexpr, FORMULA: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The scale as it was left, the scale to use, and the maximum of no tile; all unused but for FP8."""
    known = 0.0
    scale = 0.0
    if output.data is not None:
        known = tl.load(output.scale)
        scale = known
        if known == 0.0:
            peak = no_peak(BLOCK_T, BLOCK_F, GROUP)
            for first in range(0, SAMPLED_ROWS, BLOCK_T):
                sample = first + tl.arange(0, BLOCK_T)
                row = tl.where(sample < SAMPLED_ROWS, sample * tl.cdiv(T, SAMPLED_ROWS), T)
                for block in range(BLOCKS):
                    own = COLUMNS(given, block, F, BLOCK_F)
                    peak = _largest(peak, FORMULA(given, own, inverse, row, T, F)[result], GROUP)
            scale = first_scale(peak, output.data.dtype.element_ty == tl.float8e5)
    return known, scale, no_peak(BLOCK_T, BLOCK_F, GROUP)


@triton.jit
def store_result(output, scale, peak, parts, columns, row, T, GROUP: tl.constexpr):
    """Store parts of a tile in the forms that the output has; the maximum with them."""
    mask = (row < T)[:, None] & columns[1][None, :]
    place = row.to(tl.int64)[:, None] * output.columns + columns[0][None, :]
    for number in tl.static_range(len(parts)):
        x = parts[number][0]
        behind = parts[number][1]
        if output.half is not None:
            tl.store(output.half + behind + place, x.to(output.half.dtype.element_ty), mask=mask)
        if output.data is not None:
            to = output.data.dtype.element_ty
            peak = peak_of(peak, x, x.shape[0], x.shape[1], GROUP)
            fp8 = round_to_fp8(x, scale, to == tl.float8e5).to(to, bitcast=True)
            tl.store(output.data + behind + place, fp8, mask=mask)
            if output.transposed is not None:
                turned = (behind + columns[0]).to(tl.int64)[:, None] * T + row[None, :]
                tl.store(output.transposed + turned, tl.trans(fp8), mask=columns[1][:, None] & (row < T)[None, :])
    return peak


@triton.jit
def finish_result(output, known, scale, peak):
    """:func:`finish` of an output in FP8."""
    if output.data is not None:
        e5m2: tl.constexpr = output.data.dtype.element_ty == tl.float8e5
        frozen: tl.constexpr = output.pending is None
        finish(peak, known, scale, output.scale, output.pending, output.scale_inverse, e5m2, frozen)


def _name_of_formula(specialization):
    return f"{specialization.constants['FORMULA'].__name__}_kernel"


@triton.jit(repr=_name_of_formula)
def tiles_kernel(
    given,  # inputs of the formula
    inverse_ptr,  # 0-d fp32, of the scale of an input in FP8, or None
    output, saved,  # what it computes, and what it keeps
    partial_ptr,  # (programs, columns of output) fp32: sums over rows, or None
    T, F,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, FORMULA: tl.constexpr, OWN_COLUMNS: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, GROUP: tl.constexpr,
    ONE_TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of a formula over T rows and BLOCKS blocks of columns. Grid (programs,), a multiple of BLOCKS if columns
    are a program's own.

    Every program visits each programs-th tile.
    """
    inverse = None
    if inverse_ptr is not None:
        inverse = tl.load(inverse_ptr)
    known, scale, peak = begin(
        output, 0, given, inverse, T, F, BLOCKS, COLUMNS, FORMULA, SAMPLED_ROWS, BLOCK_T, BLOCK_F, GROUP
    )
    saved_known, saved_scale, saved_peak = begin(
        saved, 1, given, inverse, T, F, BLOCKS, COLUMNS, FORMULA, SAMPLED_ROWS, BLOCK_T, BLOCK_F, GROUP
    )
    WALKED: tl.constexpr = 1 if OWN_COLUMNS else BLOCKS
    STEPS: tl.constexpr = BLOCKS if OWN_COLUMNS else 1
    first = tl.program_id(0) // STEPS
    own = COLUMNS(given, tl.program_id(0) % BLOCKS, F, BLOCK_F)
    total = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    # the compiler removes the loop over a single tile, and with it the registers that it would hold
    end = first + 1 if ONE_TILE else tl.cdiv(T, BLOCK_T) * WALKED
    for tile in tl.range(first, end, tl.num_programs(0) // STEPS, num_stages=STAGES):
        row = tile // WALKED * BLOCK_T + tl.arange(0, BLOCK_T)
        columns = own
        if not OWN_COLUMNS:
            columns = COLUMNS(given, tile % BLOCKS, F, BLOCK_F)
        parts, saved_parts = FORMULA(given, columns, inverse, row, T, F)
        peak = store_result(output, scale, peak, parts, columns, row, T, GROUP)
        saved_peak = store_result(saved, saved_scale, saved_peak, saved_parts, columns, row, T, GROUP)
        if partial_ptr is not None:
            total += parts[0][0]
    if partial_ptr is not None:
        tl.store(partial_ptr + first * output.columns + own[0], tl.sum(total, 0), mask=own[1])
    finish_result(output, known, scale, peak)
    finish_result(saved, saved_known, saved_scale, saved_peak)
