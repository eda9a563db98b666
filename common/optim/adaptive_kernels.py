"""Kernels of LAMB, AdamW and Adam: one program per block of a fragment, settings looked up by block.

No atomics: every block writes its own partial sums, which are added up in a fixed order.
"""

# mypy: disable-error-code=no-untyped-def
# (Triton kernels take pointers and constexpr values, for which there are no types.)

from __future__ import annotations

import triton
import triton.language as tl

# Elements of the model's dtype that a thread loads or stores at once. Without the bound 16-bit tensors would take 8 and
# force the layout on the float32 tensors beside them, whose accesses would then leave gaps, with copies through shared
# memory between loads and stores.
VECTOR = tl.constexpr(4)


@triton.jit
def adaptive_measure_kernel(
    gradients_ptr,  # [size]
    block_start_ptr,  # [blocks] int64
    block_stop_ptr,  # [blocks] int64
    block_group_ptr,  # [blocks] int32
    square_weight_ptr,  # [groups] float32, what squares of gradients are multiplied with
    squares_ptr,  # [programs] float32, written
    infinite_ptr,  # [programs] float32, written
    blocks,
    MEASURED_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Weighted sum of squares of the gradients of some blocks, and whether all are finite."""
    program = tl.program_id(0)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    infinite = tl.zeros([BLOCK], dtype=tl.int32)
    first = program * MEASURED_BLOCKS
    for block in range(first, tl.minimum(first + MEASURED_BLOCKS, blocks)):
        start = tl.multiple_of(tl.load(block_start_ptr + block), ALIGNMENT)
        stop = tl.multiple_of(tl.load(block_stop_ptr + block), ALIGNMENT)
        weight = tl.load(square_weight_ptr + tl.load(block_group_ptr + block))
        offsets = start + tl.arange(0, BLOCK)
        gradients = tl.load(gradients_ptr + offsets, mask=offsets < stop, other=0.0).to(tl.float32)
        squares += gradients * gradients * weight
        infinite = tl.where(tl.abs(gradients) < float("inf"), infinite, 1)
    tl.store(squares_ptr + program, tl.sum(squares, axis=0))
    tl.store(infinite_ptr + program, tl.max(infinite, axis=0).to(tl.float32))


@triton.jit
def adaptive_stats_kernel(
    squares_ptr,  # [programs] float32
    infinite_ptr,  # [programs] float32
    stats_ptr,  # [2] float32, added to
    programs,
    CHUNK: tl.constexpr,
):
    """Add up, in order, what the programs of the measuring pass found."""
    squares = tl.zeros([CHUNK], dtype=tl.float32)
    infinite = tl.zeros([CHUNK], dtype=tl.float32)
    for chunk in range(0, programs, CHUNK):
        entries = chunk + tl.arange(0, CHUNK)
        squares += tl.load(squares_ptr + entries, mask=entries < programs, other=0.0)
        infinite += tl.load(infinite_ptr + entries, mask=entries < programs, other=0.0)
    tl.store(stats_ptr, tl.load(stats_ptr) + tl.sum(infinite, axis=0))
    tl.store(stats_ptr + 1, tl.load(stats_ptr + 1) + tl.sum(squares, axis=0))


@triton.jit
def adaptive_corrections_kernel(
    step_ptr,  # 0-d int64
    log_betas_ptr,  # [2] float64
    corrections_ptr,  # [2] float32, written
):
    """What m and sqrt(v) are multiplied with; in float64, since 1 - beta cancels."""
    count = (tl.load(step_ptr) + 1).to(tl.float64)
    first = 1.0 - tl.exp(count * tl.load(log_betas_ptr))
    second = 1.0 - tl.exp(count * tl.load(log_betas_ptr + 1))
    tl.store(corrections_ptr, (1.0 / first).to(tl.float32))
    tl.store(corrections_ptr + 1, (1.0 / tl.sqrt(second)).to(tl.float32))


@triton.jit
def _direction(average, square_average, weights, decay, corrections_ptr, epsilon):
    """u of the formulas; both passes call it, so that they agree."""
    scaled = average * tl.load(corrections_ptr)
    root = tl.sqrt(square_average) * tl.load(corrections_ptr + 1)
    return scaled / (root + epsilon) + decay * weights


@triton.jit
def _joined(parameters_ptr, remainders_ptr, offsets, mask):
    """Masters of bfloat16 parameters and what they have beyond these (common.optim.shard.joined_masters)."""
    high = tl.load(parameters_ptr + offsets, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
    low = tl.load(remainders_ptr + offsets, mask=mask, other=0).to(tl.int32)
    return ((high << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def _store_split(parameters_ptr, remainders_ptr, offsets, weights, mask):
    """The reverse (common.optim.shard.split_masters)."""
    bits = weights.to(tl.int32, bitcast=True)
    nearest = ((bits + 32768) >> 16).to(tl.int16)
    tl.store(parameters_ptr + offsets, nearest.to(tl.bfloat16, bitcast=True), mask=mask)
    tl.store(remainders_ptr + offsets, bits.to(tl.int16), mask=mask)


@triton.jit
def adaptive_first_pass_kernel(
    parameters_ptr,  # [size], what the model computes with
    masters_ptr,  # [size] float32, the same as parameters_ptr without HAS_MASTERS; int16 if REMAINDERS
    gradients_ptr,  # [size]
    averages_ptr,  # [size] float32
    square_averages_ptr,  # [size] float32
    block_start_ptr,  # [blocks] int64
    block_stop_ptr,  # [blocks] int64
    block_group_ptr,  # [blocks] int32
    multiplier_ptr,  # [groups] float32
    decay_ptr,  # [groups] float32
    rates_ptr,  # [groups] float32
    trust_ptr,  # [groups] int32
    corrections_ptr,  # [2] float32
    grad_factor_ptr,  # 0-d float32
    write_ptr,  # 0-d bool
    weight_squares_ptr,  # [blocks] float32, written for groups with a trust ratio
    direction_squares_ptr,  # [blocks] float32, likewise
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    epsilon,
    DECAY_IN_GRADIENT: tl.constexpr,
    NORM_OF_MODEL: tl.constexpr,
    HAS_MASTERS: tl.constexpr,
    REMAINDERS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Moments of one block; then the partial sums for its trust ratio or, without one, the weights."""
    block = tl.program_id(0)
    start = tl.multiple_of(tl.load(block_start_ptr + block), ALIGNMENT)
    stop = tl.multiple_of(tl.load(block_stop_ptr + block), ALIGNMENT)
    group = tl.load(block_group_ptr + block)
    if tl.load(write_ptr):
        decay = tl.load(decay_ptr + group)
        offsets = start + tl.arange(0, BLOCK)
        model_offsets = tl.max_contiguous(start + tl.arange(0, BLOCK), VECTOR)
        mask = offsets < stop
        gradients = tl.load(gradients_ptr + model_offsets, mask=mask, other=0.0).to(tl.float32)
        average = tl.load(averages_ptr + offsets, mask=mask, other=0.0)
        square_average = tl.load(square_averages_ptr + offsets, mask=mask, other=0.0)
        if REMAINDERS:
            weights = _joined(parameters_ptr, masters_ptr, model_offsets, mask)
        else:
            weights = tl.load(masters_ptr + offsets, mask=mask, other=0.0)
        gradients *= tl.load(multiplier_ptr + group) * tl.load(grad_factor_ptr)
        if DECAY_IN_GRADIENT:
            gradients += decay * weights
            decay = 0.0
        average = beta1 * average + one_minus_beta1 * gradients
        square_average = beta2 * square_average + one_minus_beta2 * gradients * gradients
        tl.store(averages_ptr + offsets, average, mask=mask)
        tl.store(square_averages_ptr + offsets, square_average, mask=mask)
        direction = _direction(average, square_average, weights, decay, corrections_ptr, epsilon)
        if tl.load(trust_ptr + group) > 0:
            normed = weights
            if NORM_OF_MODEL:  # rounding the master again is cheaper than reading what it was rounded to
                normed = weights.to(parameters_ptr.dtype.element_ty).to(tl.float32)
            tl.store(weight_squares_ptr + block, tl.sum(normed * normed, axis=0))
            tl.store(direction_squares_ptr + block, tl.sum(direction * direction, axis=0))
        else:
            weights -= tl.load(rates_ptr + group) * direction
            if REMAINDERS:
                _store_split(parameters_ptr, masters_ptr, model_offsets, weights, mask)
            else:
                tl.store(masters_ptr + offsets, weights, mask=mask)
            if HAS_MASTERS and not REMAINDERS:
                tl.store(parameters_ptr + model_offsets, weights.to(parameters_ptr.dtype.element_ty), mask=mask)


@triton.jit
def adaptive_norms_kernel(
    weight_squares_ptr,  # [blocks] float32
    direction_squares_ptr,  # [blocks] float32
    fragment_tensor_ptr,  # [fragments] int32
    fragment_block_ptr,  # [fragments + 1] int32, first block of each fragment
    squares_ptr,  # [2 * tensors] float32, written at this fragment's tensor
    tensors,
    CHUNK: tl.constexpr,
):
    """Add up the partial sums of one fragment, in order."""
    fragment = tl.program_id(0)
    first = tl.load(fragment_block_ptr + fragment)
    last = tl.load(fragment_block_ptr + fragment + 1)
    weight_sum = tl.zeros([CHUNK], dtype=tl.float32)
    direction_sum = tl.zeros([CHUNK], dtype=tl.float32)
    for chunk in range(first, last, CHUNK):
        blocks = chunk + tl.arange(0, CHUNK)
        weight_sum += tl.load(weight_squares_ptr + blocks, mask=blocks < last, other=0.0)
        direction_sum += tl.load(direction_squares_ptr + blocks, mask=blocks < last, other=0.0)
    tensor = tl.load(fragment_tensor_ptr + fragment)
    tl.store(squares_ptr + tensor, tl.sum(weight_sum, axis=0))
    tl.store(squares_ptr + tensors + tensor, tl.sum(direction_sum, axis=0))


@triton.jit
def adaptive_second_pass_kernel(
    parameters_ptr,  # [size], what the model computes with
    masters_ptr,  # [size] float32, the same as parameters_ptr without HAS_MASTERS
    averages_ptr,  # [size] float32
    square_averages_ptr,  # [size] float32
    block_start_ptr,  # [blocks] int64
    block_stop_ptr,  # [blocks] int64
    block_group_ptr,  # [blocks] int32
    block_tensor_ptr,  # [blocks] int32
    decay_ptr,  # [groups] float32
    rates_ptr,  # [groups] float32
    trust_ptr,  # [groups] int32
    squares_ptr,  # [2 * tensors] float32: weights, directions
    corrections_ptr,  # [2] float32
    write_ptr,  # 0-d bool
    tensors,
    epsilon,
    HAS_MASTERS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Weights of one block whose group has a trust ratio."""
    # Backwards: what the first pass touched last still lies in the L2 cache; with many ranks that is all of a shard.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    start = tl.multiple_of(tl.load(block_start_ptr + block), ALIGNMENT)
    stop = tl.multiple_of(tl.load(block_stop_ptr + block), ALIGNMENT)
    group = tl.load(block_group_ptr + block)
    if tl.load(write_ptr) & (tl.load(trust_ptr + group) > 0):
        offsets = start + tl.arange(0, BLOCK)
        model_offsets = tl.max_contiguous(start + tl.arange(0, BLOCK), VECTOR)
        mask = offsets < stop
        average = tl.load(averages_ptr + offsets, mask=mask, other=0.0)
        square_average = tl.load(square_averages_ptr + offsets, mask=mask, other=0.0)
        weights = tl.load(masters_ptr + offsets, mask=mask, other=0.0)
        tensor = tl.load(block_tensor_ptr + block)
        weight_norm = tl.sqrt(tl.load(squares_ptr + tensor))
        direction_norm = tl.sqrt(tl.load(squares_ptr + tensors + tensor))
        defined = (weight_norm > 0.0) & (direction_norm > 0.0)
        ratio = tl.where(defined, weight_norm / tl.where(defined, direction_norm, 1.0), 1.0)
        rate = tl.load(rates_ptr + group)
        decay = tl.load(decay_ptr + group)
        weights -= rate * ratio * _direction(average, square_average, weights, decay, corrections_ptr, epsilon)
        tl.store(masters_ptr + offsets, weights, mask=mask)
        if HAS_MASTERS:
            tl.store(parameters_ptr + model_offsets, weights.to(parameters_ptr.dtype.element_ty), mask=mask)
