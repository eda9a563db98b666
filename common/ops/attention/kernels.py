# mypy: allow-untyped-defs
"""Triton kernels of attention within sequences of a flat buffer.

Shapes: T tokens of the buffer, S sequences (capacity), H heads, D head dimension, M queries and N keys of a block.
A program owns one block of one sequence and head and returns at once if the sequence is too short, so the grid depends
on capacities only. Additional programs write zeros to the rows outside all sequences. One program computes each sum in
a fixed order, so results are the same in every run.

- ``attention_forward_kernel`` (a block of queries) is the online softmax of Milakov and Gimelshein 2018 in base 2,
  tiled as in FlashAttention (Dao et al. 2022). It also writes the logarithm (base 2) of the sum of the softmax, and the
  dropout mask as bits, in words of 32 keys: hashing is half of the work on a tile, reading a bit is one operation.
- ``attention_query_gradient_kernel`` (a block of queries) writes dq, a copy of that logarithm, and delta =
  sum(context * d_context), which the gradient of the softmax subtracts.
- ``attention_key_value_gradient_kernel`` (a block of keys, transposed tiles) writes dk and dv. Two of the seven matrix
  products of backward are computed twice, so that no two programs add to the same gradient.

In FP8 dq, dk and dv share one scale. Two more kernels of one program each run before and after the gradients: they
choose the scale and update it. The first scale is estimated from the gradient of the context with a margin, because
dq, dk and dv are not known yet.

Roofline on an H200 (bf16, D = 64; 23 packs of one 512-token sequence, 2 of two, 23 of three; H = 16): 24,576 tokens
times 360 tokens in the sequence of a token, times H, are 142 million probabilities. Milliseconds for all of them:

======================  =====================================================  =======  =====  =======
unit                    rate                                                   forward  dq     dk, dv
======================  =====================================================  =======  =====  =======
tensor cores            790 TFLOP/s (a large product as measured); 4, 6, 8 D   0.05     0.07   0.09
integer and compare     64 a cycle and multiprocessor, 15 Tera/s; 13, 6, 4     0.12     0.06   0.04
instructions issued     128 a cycle and multiprocessor; 25, 14, 12             0.12     0.07   0.06
exponentials            16 a cycle and multiprocessor                          0.04     0.04   0.04
memory                  4.3 TB/s; 0.22, 0.27, 0.32 GB with the mask            0.05     0.06   0.08
======================  =====================================================  =======  =====  =======

The largest numbers of the columns add up to 0.28 ms per layer, times 1.15 for partly filled tiles of short sequences.
Measured: 0.24, 0.21 and 0.30 ms, bound by latencies. Operations are counted per probability in the machine code of
64 x 64 tiles. The units overlap only if programs share a multiprocessor, so tiles are small: with 4 warps each, the
registers allow three programs of forward or dq, or two of dk, dv. Small tiles also waste less: a sequence of 171 tokens
fills 3 x 3 tiles to 79 percent, 2 x 2 tiles of 128 to 45 percent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.attention.reference import GRADIENT_MARGIN
from common.ops.dropout.triton import keep_of_rows, mask_keys
from common.ops.fp8_cast.device import INFINITY_BITS, magnitude_bits, no_peak, peak_of, round_to_fp8, scale_of

GAP_ROWS = 64
"""Tokens per program of those that write zeros outside all sequences."""

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_GRADIENT_MARGIN: tl.constexpr = tl.constexpr(GRADIENT_MARGIN)


@triton.jit
def _outside_all(row, T, starts_ptr, lengths_ptr, S, CHUNK: tl.constexpr):
    """Return a mask of the tokens ``row`` of the buffer that belong to no sequence."""
    covered = tl.zeros(row.shape, tl.int32)
    for first in range(0, S, CHUNK):
        sequence = first + tl.arange(0, CHUNK)
        start = tl.load(starts_ptr + sequence, mask=sequence < S, other=0)
        length = tl.load(lengths_ptr + sequence, mask=sequence < S, other=0)
        position = row[:, None] - start[None, :]
        covered += tl.sum(((position >= 0) & (position < length[None, :])).to(tl.int32), 1)
    return (covered == 0) & (row < T)


@triton.jit
def _fill_gap(target_ptr, T, starts_ptr, lengths_ptr, S, WIDTH: tl.constexpr, GAP_ROWS: tl.constexpr):
    """Write zeros to the rows of (T, WIDTH) that belong to no sequence. Each program handles GAP_ROWS tokens."""
    behind = (tl.program_id(2) - S) * tl.num_programs(1) + tl.program_id(1)
    row = (behind * tl.num_programs(0) + tl.program_id(0)) * GAP_ROWS + tl.arange(0, GAP_ROWS)
    outside = _outside_all(row, T, starts_ptr, lengths_ptr, S, 64)
    if tl.max(outside.to(tl.int32), 0) > 0:
        zero = tl.zeros((GAP_ROWS, 64), target_ptr.dtype.element_ty)
        for first in range(0, WIDTH, 64):
            column = first + tl.arange(0, 64)
            inside = outside[:, None] & (column < WIDTH)[None, :]
            tl.store(target_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], zero, mask=inside)


@triton.jit
def _mask_offsets(first_key, token, head, words_of_row, T, BLOCK_N: tl.constexpr):
    """Return the offsets of the words of the dropout mask for a tile, (tokens, BLOCK_N / 32)."""
    word = head * words_of_row + first_key // 32 + tl.arange(0, BLOCK_N // 32)
    return word.to(tl.int64)[None, :] * T + token[:, None]


@triton.jit
def _bits(words, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the bits of (BLOCK_M, BLOCK_N / 32) words as bool (BLOCK_M, BLOCK_N)."""
    set_ = (words[:, :, None] & (1 << tl.arange(0, 32))[None, None, :]) != 0
    return tl.reshape(set_, (BLOCK_M, BLOCK_N))


@triton.jit
def _note_peak(pending_ptr, peak):
    tl.atomic_max(pending_ptr, tl.max(tl.max(peak, 1), 0))


@triton.jit(do_not_specialize=["site"])
def attention_forward_kernel(
    qkv_ptr,  # (T, 3, H, D)
    starts_ptr, lengths_ptr,  # (S,) int32 or int64
    seed_ptr,  # 0-d int64
    context_ptr,  # (T, H, D)
    lse_ptr,  # (H, T) fp32
    mask_ptr,  # (H, words_of_row, T) int32 if THRESHOLD
    T, S, site, max_length, words_of_row, scale,
    H: tl.constexpr, D: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr, PAIRS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GAP_ROWS: tl.constexpr,
):  # fmt: skip
    """Write context, lse and mask of a block of queries; in gaps, zeros as context. Grid (blocks, H, S + gaps)."""
    if tl.program_id(2) >= S:
        _fill_gap(context_ptr, T, starts_ptr, lengths_ptr, S, H * D, GAP_ROWS)
        return
    head = tl.program_id(1)
    length = tl.load(lengths_ptr + tl.program_id(2)).to(tl.int32)  # a 64-bit index would hash to another mask
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_M >= length:
        return
    start = tl.load(starts_ptr + tl.program_id(2)).to(tl.int64)
    token = start + query
    exists = query < length
    feature = tl.arange(0, D)
    column = tl.arange(0, BLOCK_N)
    sequence_ptr = qkv_ptr + start * (3 * H * D) + head * D
    offset = column[:, None] * (3 * H * D) + feature[None, :]
    q = tl.load(sequence_ptr + query[:, None] * (3 * H * D) + feature[None, :], mask=exists[:, None], other=0.0)
    exponent_scale = scale * _LOG2_E

    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    context = tl.zeros((BLOCK_M, D), tl.float32)
    if THRESHOLD:
        first_key, second_key = mask_keys(seed_ptr, site)
        row_index = ((token * H + head) * max_length).to(tl.uint32)
    for first in range(0, length, BLOCK_N):
        valid = first + column < length
        tile_ptr = sequence_ptr + first * (3 * H * D)
        k = tl.load(tile_ptr + H * D + offset, mask=valid[:, None], other=0.0)
        v = tl.load(tile_ptr + 2 * H * D + offset, mask=valid[:, None], other=0.0)
        # adding -inf masks the keys after the end; scaling and masking are one multiply-add
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        score = score * exponent_scale + tl.where(valid, 0.0, float("-inf"))[None, :]
        larger = tl.maximum(largest, tl.max(score, 1))
        probability = tl.exp2(score - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(probability, 1)
        largest = larger
        if THRESHOLD:
            keep = keep_of_rows(row_index + first, BLOCK_N, PAIRS, first_key, second_key, THRESHOLD)
            probability = tl.where(keep, probability, 0.0)
            # Take the bits from the probability: from keep, the compiler would hash again in another layout. A kept
            # probability that underflows to zero loses its bit, but it is zero in the gradients as well.
            bits = tl.where(probability > 0.0, (1 << (column % 32))[None, :], 0)
            words = tl.sum(tl.reshape(bits, (BLOCK_M, BLOCK_N // 32, 32)), 2)
            tl.store(
                mask_ptr + _mask_offsets(first, token, head, words_of_row, T, BLOCK_N), words, mask=exists[:, None]
            )
        context = context * shrink[:, None]
        context = tl.dot(probability.to(v.dtype), v, context, input_precision=PRECISION)

    context = context * (INVERSE_KEEP / total)[:, None]
    target = context_ptr + (token * H + head)[:, None] * D + feature[None, :]
    tl.store(target, context.to(context_ptr.dtype.element_ty), mask=exists[:, None])
    row = head.to(tl.int64) * T + token
    tl.store(lse_ptr + row, largest + tl.log2(total), mask=exists)


@triton.jit
def attention_query_gradient_kernel(
    qkv_ptr,  # (T, 3, H, D)
    starts_ptr, lengths_ptr,  # (S,) int32 or int64
    context_ptr, d_context_ptr,  # (T, H, D)
    lse_ptr,  # (H, T) fp32
    mask_ptr,  # (H, words_of_row, T) int32 if THRESHOLD
    dqkv_ptr,  # (T, 3, H, D), e5m2 if FP8
    scale_ptr,  # 0-d fp32 if FP8: scale of dqkv
    pending_ptr,  # (2,) int32 if FP8: bits of the maximum so far
    rows_ptr,  # (2, H, T) fp32: lse, delta / INVERSE_KEEP
    partial_ptr,  # (S * blocks, H * D) fp32 if SUMS
    T, S, words_of_row, scale,
    H: tl.constexpr, D: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr, SUMS: tl.constexpr,
    FP8: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GAP_ROWS: tl.constexpr,
):  # fmt: skip
    """Write dq, its sums, and lse and delta for dk and dv, of one block of queries. Grid (blocks, H, S + gaps).

    The gradient of a score is p * (keep * INVERSE_KEEP * (d_context . v) - delta). INVERSE_KEEP is factored out of the
    parentheses and multiplied at the end.
    """
    if tl.program_id(2) >= S:
        _fill_gap(dqkv_ptr, T, starts_ptr, lengths_ptr, S, 3 * H * D, GAP_ROWS)
        return
    head = tl.program_id(1)
    length = tl.load(lengths_ptr + tl.program_id(2)).to(tl.int32)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = tl.arange(0, D)
    sums_ptr = partial_ptr
    if SUMS:
        sums_ptr += (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * (H * D) + head * D + feature
    if tl.program_id(0) * BLOCK_M >= length:
        if SUMS:
            tl.store(sums_ptr, tl.zeros((D,), tl.float32))
        return
    start = tl.load(starts_ptr + tl.program_id(2)).to(tl.int64)
    token = start + query
    exists = query < length
    column = tl.arange(0, BLOCK_N)
    sequence_ptr = qkv_ptr + start * (3 * H * D) + head * D
    offset = column[:, None] * (3 * H * D) + feature[None, :]
    q = tl.load(sequence_ptr + query[:, None] * (3 * H * D) + feature[None, :], mask=exists[:, None], other=0.0)
    output = (token * H + head)[:, None] * D + feature[None, :]
    context = tl.load(context_ptr + output, mask=exists[:, None], other=0.0)
    d_context = tl.load(d_context_ptr + output, mask=exists[:, None], other=0.0)
    row = head.to(tl.int64) * T + token
    lse = tl.load(lse_ptr + row, mask=exists, other=float("inf"))
    delta = tl.sum(context.to(tl.float32) * d_context.to(tl.float32), 1) / INVERSE_KEEP
    tl.store(rows_ptr + row, lse, mask=exists)
    tl.store(rows_ptr + H * T + row, delta, mask=exists)

    exponent_scale = scale * _LOG2_E
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    for first in range(0, length, BLOCK_N):
        valid = column < length - first
        tile_ptr = sequence_ptr + first * (3 * H * D)
        k = tl.load(tile_ptr + H * D + offset, mask=valid[:, None], other=0.0)
        v = tl.load(tile_ptr + 2 * H * D + offset, mask=valid[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        # A logarithm of at most 0 bounds probabilities by 1; -inf makes them 0 for keys after the end.
        bound = tl.where(valid, 0.0, float("-inf"))
        probability = tl.exp2(tl.minimum(score * exponent_scale - lse[:, None], bound[None, :]))
        d_probability = tl.dot(d_context, tl.trans(v), input_precision=PRECISION)
        if THRESHOLD:
            offsets = _mask_offsets(first, token, head, words_of_row, T, BLOCK_N)
            words = tl.load(mask_ptr + offsets, mask=exists[:, None], other=0)
            d_probability = tl.where(_bits(words, BLOCK_M, BLOCK_N), d_probability, 0.0)
        d_score = probability * (d_probability - delta[:, None])
        dq = tl.dot(d_score.to(k.dtype), k, dq, input_precision=PRECISION)
    dq *= scale * INVERSE_KEEP
    target = dqkv_ptr + token[:, None] * (3 * H * D) + head * D + feature[None, :]
    if FP8:
        _note_peak(pending_ptr, peak_of(no_peak(BLOCK_M, D, 1), dq, BLOCK_M, D, 1))
        tl.store(target, round_to_fp8(dq, tl.load(scale_ptr), True), mask=exists[:, None])
    else:
        tl.store(target, dq.to(dqkv_ptr.dtype.element_ty), mask=exists[:, None])
    if SUMS:
        tl.store(sums_ptr, tl.sum(dq, 0))  # rows after the end are zero, because their probabilities are


@triton.jit
def attention_key_value_gradient_kernel(
    qkv_ptr,  # (T, 3, H, D)
    starts_ptr, lengths_ptr,  # (S,) int32 or int64
    d_context_ptr,  # (T, H, D)
    rows_ptr,  # (2, H, T) fp32: lse, delta / INVERSE_KEEP
    mask_ptr,  # (H, words_of_row, T) int32 if THRESHOLD
    dqkv_ptr,  # (T, 3, H, D), e5m2 if FP8
    scale_ptr,  # 0-d fp32 if FP8: scale of dqkv
    pending_ptr,  # (2,) int32 if FP8: bits of the maximum so far
    partial_ptr,  # (S * blocks, 2, H * D) fp32 if SUMS
    T, words_of_row, scale,
    H: tl.constexpr, D: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr, SUMS: tl.constexpr,
    FP8: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dk, dv and their sums over one block of keys. Grid (blocks, H, S).

    Tiles are transposed, keys by queries, so that the probabilities are the left factor of the product that gives dv
    and need not change their layout in registers.
    """
    head = tl.program_id(1)
    length = tl.load(lengths_ptr + tl.program_id(2)).to(tl.int32)
    key = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    feature = tl.arange(0, D)
    sums_ptr = partial_ptr
    if SUMS:
        sums_ptr += (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * (2 * H * D) + head * D + feature
    if tl.program_id(0) * BLOCK_N >= length:
        if SUMS:
            tl.store(sums_ptr, tl.zeros((D,), tl.float32))
            tl.store(sums_ptr + H * D, tl.zeros((D,), tl.float32))
        return
    start = tl.load(starts_ptr + tl.program_id(2)).to(tl.int64)
    exists = key < length
    sequence_ptr = qkv_ptr + start * (3 * H * D) + head * D
    d_sequence_ptr = d_context_ptr + (start * H + head) * D
    row = head.to(tl.int64) * T + start
    offset = key[:, None] * (3 * H * D) + feature[None, :]
    k = tl.load(sequence_ptr + H * D + offset, mask=exists[:, None], other=0.0)
    v = tl.load(sequence_ptr + 2 * H * D + offset, mask=exists[:, None], other=0.0)

    exponent_scale = scale * _LOG2_E
    row_of_tile = tl.arange(0, BLOCK_M)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for first in range(0, length, BLOCK_M):
        query = first + row_of_tile
        valid = row_of_tile < length - first
        q = tl.load(sequence_ptr + query[:, None] * (3 * H * D) + feature[None, :], mask=valid[:, None], other=0.0)
        d_offset = query[:, None] * (H * D) + feature[None, :]
        d_context = tl.load(d_sequence_ptr + d_offset, mask=valid[:, None], other=0.0)
        # Load lse and delta as one tensor with an element for each thread of 4 warps: if there were fewer elements,
        # all threads would load copies. After the end all factors are zero, so a probability of 1 adds nothing.
        row_offset = query[:, None] + (tl.arange(0, 2) * (H * T))[None, :]
        lse, delta = tl.split(tl.load(rows_ptr + row + row_offset, mask=valid[:, None], other=0.0))
        score = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        probability = tl.exp2(score * exponent_scale - lse[None, :])
        d_probability = tl.dot(v, tl.trans(d_context), input_precision=PRECISION)
        kept = probability
        if THRESHOLD:
            offsets = _mask_offsets(tl.program_id(0) * BLOCK_N, start + query, head, words_of_row, T, BLOCK_N)
            words = tl.load(mask_ptr + offsets, mask=valid[:, None], other=0)
            keep = tl.trans(_bits(words, BLOCK_M, BLOCK_N))
            kept = tl.where(keep, probability, 0.0)
        dv = tl.dot(kept.to(d_context.dtype), d_context, dv, input_precision=PRECISION)
        d_score = kept * d_probability - probability * delta[None, :]
        dk = tl.dot(d_score.to(q.dtype), q, dk, input_precision=PRECISION)
    dk *= scale * INVERSE_KEEP
    dv *= INVERSE_KEEP
    target = dqkv_ptr + start * (3 * H * D) + H * D + head * D + offset
    dk = tl.where(exists[:, None], dk, 0.0)
    dv = tl.where(exists[:, None], dv, 0.0)
    if FP8:
        scale = tl.load(scale_ptr)
        peak = peak_of(no_peak(BLOCK_N, D, 1), dk, BLOCK_N, D, 1)
        _note_peak(pending_ptr, peak_of(peak, dv, BLOCK_N, D, 1))
        tl.store(target, round_to_fp8(dk, scale, True), mask=exists[:, None])
        tl.store(target + H * D, round_to_fp8(dv, scale, True), mask=exists[:, None])
    else:
        tl.store(target, dk.to(dqkv_ptr.dtype.element_ty), mask=exists[:, None])
        tl.store(target + H * D, dv.to(dqkv_ptr.dtype.element_ty), mask=exists[:, None])
    if SUMS:
        tl.store(sums_ptr, tl.sum(dk, 0))
        tl.store(sums_ptr + H * D, tl.sum(dv, 0))


@triton.jit
def attention_gradient_scale_kernel(
    d_context_ptr,  # (T, H * D)
    known_ptr,  # 0-d fp32: scale from the previous use, 0 before the first
    scale_ptr, scale_inverse_ptr,  # 0-d fp32, written
    T,
    WIDTH: tl.constexpr, SAMPLED_ROWS: tl.constexpr,
):  # fmt: skip
    """Write the known scale, or if it is 0 one estimated from d_context, and the inverse. Grid (1,)."""
    known = tl.load(known_ptr)
    scale = known
    if known == 0.0:
        row = tl.arange(0, SAMPLED_ROWS).to(tl.int64) * tl.cdiv(T, SAMPLED_ROWS)
        bits = tl.zeros((SAMPLED_ROWS, 64), tl.int32)
        for first in range(0, WIDTH, 64):
            column = first + tl.arange(0, 64)
            mask = (row < T)[:, None] & (column < WIDTH)[None, :]
            x = tl.load(d_context_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
            # rows outside all sequences may contain inf or NaN
            bits = tl.maximum(bits, tl.where(magnitude_bits(x) < INFINITY_BITS, magnitude_bits(x), 0))
        amax = tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)
        scale = scale_of(amax * _GRADIENT_MARGIN, 1.0, True)
    tl.store(scale_ptr, scale)
    tl.store(scale_inverse_ptr, tl.div_rn(1.0, scale))


@triton.jit
def attention_next_scale_kernel(
    scale_ptr,  # 0-d fp32, updated
    pending_ptr,  # (2,) int32: bits of the maximum of dq, dk and dv; zeros afterwards
):  # fmt: skip
    """Update the scale by the maximum of dq, dk and dv, which is then cleared. Grid (1,)."""
    amax = tl.load(pending_ptr).to(tl.float32, bitcast=True)
    tl.store(pending_ptr, 0)
    tl.store(scale_ptr, scale_of(amax, tl.load(scale_ptr), True))
