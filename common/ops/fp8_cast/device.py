# mypy: allow-untyped-defs
"""Delayed FP8 scaling for Triton kernels that write their results in FP8.

Such a kernel has a one-dimensional grid of programs that loop over tiles. Every program loads the scale first; if it is
0 (unknown), :func:`first_scale` computes one from a sample of results. The program rounds results with
:func:`round_to_fp8`, collects the largest magnitude with :func:`peak_of`, and ends with :func:`finish`, which writes
the inverse of the used scale and the scale of the next use.

The maximum has two stages: each program computes the maximum of bit patterns (those of non-negative floats have the
order of integers, with NaN above infinity), then all programs update an atomic maximum, which is exact in any order.
The last program writes the scale, because all others have read the old scale by then. This saves a launch per result.
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
    """Return the bits of |x| as int32, for x in fp32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def no_peak(ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return the initial maximum, 0: int32 (ROWS, COLUMNS / GROUP)."""
    return tl.zeros((ROWS, COLUMNS // GROUP), tl.int32)


@triton.jit
def peak_of(peak, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return the maximum of ``peak`` and the magnitudes of a tile (ROWS, COLUMNS), as bits in the form of ``no_peak``.

    Args:
        GROUP: neighbours in a row that share a maximum; one thread holds them, so that it needs one register.
    """
    bits = magnitude_bits(x)
    if GROUP > 1:
        bits = tl.max(tl.reshape(bits, (ROWS, COLUMNS // GROUP, GROUP)), 2)
    return tl.maximum(peak, bits)


@triton.jit
def scale_of(amax, otherwise, E5M2: tl.constexpr):
    """Return the scale for ``amax``, or ``otherwise`` if ``amax`` is 0 or not finite."""
    largest: tl.constexpr = LARGEST_E5M2 if E5M2 else LARGEST_E4M3
    scale = tl.minimum(tl.div_rn(tl.full((), largest, tl.float32), amax), LARGEST_SCALE)
    return tl.where((amax > 0.0) & (amax < float("inf")), scale, otherwise)


@triton.jit
def first_scale(peak, E5M2: tl.constexpr):
    """Return the scale of a first use from the maximum of a sample."""
    amax = tl.max(tl.max(peak, 1), 0).to(tl.float32, bitcast=True)
    return scale_of(amax * FIRST_MARGIN, 1.0, E5M2)


@triton.jit
def round_to_fp8(x, scale, E5M2: tl.constexpr):
    """Return ``scale * x`` in FP8 as bytes, saturated; NaN where x is not finite."""
    largest: tl.constexpr = LARGEST_E5M2 if E5M2 else LARGEST_E4M3
    scaled = tl.clamp(x * scale, -largest, largest)
    # before the conversion to bytes, because four of them share a register
    scaled = tl.where(magnitude_bits(x) < INFINITY_BITS, scaled, float("nan"))
    if E5M2:
        return scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def widen_e4m3(byte):
    """Return the fp32 values of e4m3fn bytes."""
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def finish(
    peak,  # maximum of this program
    known,  # loaded scale, 0 if unknown
    scale,  # used scale
    scale_ptr,  # 0-d fp32, updated
    pending_ptr,  # (2,) int32: bits of the maximum, number of finished programs; zeros before and after the kernel
    scale_inverse_ptr,  # 0-d fp32, written
    E5M2: tl.constexpr,
    FROZEN: tl.constexpr,
):
    """Finish a program: merge its maximum; the last program writes the next scale, unless ``FROZEN``."""
    if tl.program_id(0) == 0:
        tl.store(scale_inverse_ptr, tl.div_rn(1.0, scale))
    if not FROZEN:
        tl.debug_barrier()  # all warps have loaded the scale before another program may replace it
        tl.atomic_max(pending_ptr, tl.max(tl.max(peak, 1), 0))
        if tl.atomic_add(pending_ptr + 1, 1) == tl.num_programs(0) - 1:
            amax = tl.atomic_xchg(pending_ptr, 0).to(tl.float32, bitcast=True)
            tl.store(pending_ptr + 1, 0)
            tl.store(scale_ptr, scale_of(amax, known, E5M2))


@triton.jit
def load_tile(pointer, row, columns, T, width, inverse=None):
    """Return a tile of a (T, ``width``) tensor in fp32, 0 outside. ``inverse`` is the inverse scale of FP8 tensors.

    ``columns`` begins with the indices of the columns and the mask of the valid ones.
    """
    mask = (row < T)[:, None] & columns[1][None, :]
    offset = row.to(tl.int64)[:, None] * width + columns[0][None, :]
    x = tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)
    if inverse is not None:
        x *= inverse
    return x


@triton.jit
def block_of_columns(given, block, F, BLOCK_F: tl.constexpr):
    """Return the columns of a block and the mask of the valid ones. This is the default for ``COLUMNS``."""
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
    """Return the loaded scale (0 if unknown), the scale to use, and the initial maximum. Used only for FP8."""
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
    """Store the parts of a tile in each format of the output, and return the maximum that includes them.

    A part is a pair: the values and their first column in the output.
    """
    mask = (row < T)[:, None] & columns[1][None, :]
    offset = row.to(tl.int64)[:, None] * output.columns + columns[0][None, :]
    for number in tl.static_range(len(parts)):
        x = parts[number][0]
        behind = parts[number][1]
        if output.half is not None:
            tl.store(output.half + behind + offset, x.to(output.half.dtype.element_ty), mask=mask)
        if output.data is not None:
            to = output.data.dtype.element_ty
            peak = peak_of(peak, x, x.shape[0], x.shape[1], GROUP)
            fp8 = round_to_fp8(x, scale, to == tl.float8e5).to(to, bitcast=True)
            tl.store(output.data + behind + offset, fp8, mask=mask)
            if output.transposed is not None:
                transposed = (behind + columns[0]).to(tl.int64)[:, None] * T + row[None, :]
                tl.store(output.transposed + transposed, tl.trans(fp8), mask=columns[1][:, None] & (row < T)[None, :])
    return peak


@triton.jit
def finish_result(output, known, scale, peak):
    """Call :func:`finish` if the output has FP8."""
    if output.data is not None:
        e5m2: tl.constexpr = output.data.dtype.element_ty == tl.float8e5
        frozen: tl.constexpr = output.pending is None
        finish(peak, known, scale, output.scale, output.pending, output.scale_inverse, e5m2, frozen)


def _name_of_formula(specialization):
    return f"{specialization.constants['FORMULA'].__name__}_kernel"


@triton.jit(repr=_name_of_formula)
def tiles_kernel(
    given,  # inputs of the formula
    inverse_ptr,  # 0-d fp32, inverse scale of an FP8 input, or None
    output, saved,  # outputs for the result and for values that backward needs
    partial_ptr,  # (programs, columns of output) fp32: sums over rows, or None
    T, F,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, FORMULA: tl.constexpr, OWN_COLUMNS: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, GROUP: tl.constexpr,
    ONE_TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Evaluate a formula on T rows and BLOCKS blocks of columns. Grid (programs,); programs take tiles in turn.

    With OWN_COLUMNS a program stays in one block of columns, and the grid is a multiple of BLOCKS.
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
    # the compiler removes a loop over a single tile, which saves registers
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
