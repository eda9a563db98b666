# mypy: allow-untyped-defs
"""Triton kernels of attention with a pair bias.

Shapes: B samples, S rows of a sample, N positions in a row, H heads, C channels of a head.

- ``pair_bias_attention_forward_kernel`` (a block of queries) is the online softmax of Milakov and Gimelshein 2018 in
  base 2, tiled as in FlashAttention (Dao et al. 2022). It multiplies the context by the gate and also writes the
  logarithm (base 2) of the sum of the softmax.
- ``pair_bias_attention_query_gradient_kernel`` (a block of queries) writes dq, the gradient of the gate, the gradient
  of the context before the gate, and delta = sum(context * d_context), which the gradient of the softmax subtracts.
- ``pair_bias_attention_key_value_gradient_kernel`` (a block of keys, transposed tiles) writes dk and dv.
- ``pair_bias_attention_bias_gradient_kernel`` (a block of queries and keys) loops over a part of the rows and sums the
  gradient of the logits in registers. The gradients of single rows (256 MB in fp32 for 256 rows of 256 positions and 4
  heads) are never in memory. The product of queries and keys and that of gradients and values are computed a third
  time.

Every program computes its sums in a fixed order, so results are the same in every run.

At 256 rows of 256 positions, 4 heads and 32 channels in 16 bits: 67 MB of queries, keys, values and gates, 17 MB of
results; 67 million probabilities. At one exponential per four cycles and lane an H200 needs 20 us for these, about as
long as for the 84 MB.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(pointer, position, N, stride, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load the C channels of some positions of a row, (positions, BLOCK_C), with zeros where there is none."""
    channel = tl.arange(0, BLOCK_C)
    mask = (position < N)[:, None] & (channel < C)[None, :]
    return tl.load(pointer + position[:, None] * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _store(pointer, value, position, N, stride, C: tl.constexpr, BLOCK_C: tl.constexpr):
    channel = tl.arange(0, BLOCK_C)
    mask = (position < N)[:, None] & (channel < C)[None, :]
    offset = position[:, None] * stride + channel[None, :]
    tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _added(mask_ptr, key, N, stride, MASKED: tl.constexpr):
    """Return the number that is added to the logits (base 2) of each key: 0, or a large negative one."""
    exists = tl.load(mask_ptr + key * stride, mask=key < N, other=0).to(tl.float32)
    return tl.where(key < N, (exists - 1.0) * (MASKED * _LOG2_E), float("-inf"))


@triton.jit
def _logits(left, right, row, column, N, scale, bias_ptr, bias_at, row_stride, column_stride, PRECISION: tl.constexpr):
    """Return ``left right^T`` scaled, plus the bias that starts at ``bias_at``, in base 2, (rows, columns)."""
    logits = tl.dot(left, tl.trans(right), input_precision=PRECISION) * scale
    if bias_ptr is not None:
        mask = (row < N)[:, None] & (column < N)[None, :]
        offset = row[:, None] * row_stride + column[None, :] * column_stride
        logits += tl.load(bias_ptr + bias_at + offset, mask=mask, other=0.0).to(tl.float32) * _LOG2_E
    return logits


@triton.jit
def _row_of(pointer, S, sample_stride, row_stride):
    """Return a pointer to this program's row, one of B S."""
    row = tl.program_id(2)
    return pointer + (row // S).to(tl.int64) * sample_stride + (row % S).to(tl.int64) * row_stride


@triton.jit
def pair_bias_attention_forward_kernel(
    qkvg_ptr,  # (B, S, N, 4, H, C)
    gate_bias_ptr,  # (H, C)
    mask_ptr,  # (B, S, N)
    bias_ptr,  # (B, H, N, N) or None
    context_ptr,  # (B, S, N, H, C)
    lse_ptr,  # (B S, H, N) fp32
    S, N, scale,
    qkvg_b, qkvg_s, qkvg_n, mask_b, mask_s, mask_n, bias_b, bias_h, bias_q, bias_k, context_b, context_s, context_n,
    H: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the gated context and lse of a block of queries. Grid (blocks, H, B S)."""
    head, row = tl.program_id(1), tl.program_id(2)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    qkvg_ptr = _row_of(qkvg_ptr, S, qkvg_b, qkvg_s) + head * C
    mask_ptr = _row_of(mask_ptr, S, mask_b, mask_s)
    bias_at = (row // S).to(tl.int64) * bias_b + head * bias_h
    q = _load(qkvg_ptr, query, N, qkvg_n, C, BLOCK_C)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    context = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for first in range(0, N, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        k = _load(qkvg_ptr + H * C, key, N, qkvg_n, C, BLOCK_C)
        v = _load(qkvg_ptr + 2 * H * C, key, N, qkvg_n, C, BLOCK_C)
        logits = _logits(q, k, query, key, N, scale * _LOG2_E, bias_ptr, bias_at, bias_q, bias_k, PRECISION)
        logits += _added(mask_ptr, key, N, mask_n, MASKED)[None, :]
        larger = tl.maximum(largest, tl.max(logits, 1))
        probability = tl.exp2(logits - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(probability, 1)
        largest = larger
        context = tl.dot(probability.to(v.dtype), v, context * shrink[:, None], input_precision=PRECISION)
    gate = _gate(qkvg_ptr + 3 * H * C, gate_bias_ptr + head * C, query, N, qkvg_n, C, BLOCK_C)
    context_ptr = _row_of(context_ptr, S, context_b, context_s) + head * C
    _store(context_ptr, context / total[:, None] * gate, query, N, context_n, C, BLOCK_C)
    tl.store(lse_ptr + (row * H + head).to(tl.int64) * N + query, largest + tl.log2(total), mask=query < N)


@triton.jit
def _gate(gate_ptr, gate_bias_ptr, query, N, stride, C: tl.constexpr, BLOCK_C: tl.constexpr):
    channel = tl.arange(0, BLOCK_C)
    bias = tl.load(gate_bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    return tl.sigmoid(_load(gate_ptr, query, N, stride, C, BLOCK_C).to(tl.float32) + bias[None, :])


@triton.jit
def pair_bias_attention_query_gradient_kernel(
    qkvg_ptr,  # (B, S, N, 4, H, C)
    gate_bias_ptr,  # (H, C)
    mask_ptr,  # (B, S, N)
    bias_ptr,  # (B, H, N, N) or None
    gated_ptr,  # (B, S, N, H, C), result of the forward pass
    d_gated_ptr,  # (B, S, N, H, C)
    lse_ptr,  # (B S, H, N) fp32
    dqkvg_ptr,  # (B, S, N, 4, H, C); queries and gates are written
    d_context_ptr,  # (B S, H, N, C), written
    delta_ptr,  # (B S, H, N) fp32, written
    partial_ptr,  # (B S blocks, H, C) fp32, written: sums of the gradient of the gate
    S, N, scale,
    qkvg_b, qkvg_s, qkvg_n, mask_b, mask_s, mask_n, bias_b, bias_h, bias_q, bias_k, gated_b, gated_s, gated_n,
    d_gated_b, d_gated_s, d_gated_n, dqkvg_b, dqkvg_s, dqkvg_n,
    H: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dq and everything that depends on the gate, of a block of queries. Grid (blocks, H, B S)."""
    head, row = tl.program_id(1), tl.program_id(2)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    qkvg_ptr = _row_of(qkvg_ptr, S, qkvg_b, qkvg_s) + head * C
    dqkvg_ptr = _row_of(dqkvg_ptr, S, dqkvg_b, dqkvg_s) + head * C
    mask_ptr = _row_of(mask_ptr, S, mask_b, mask_s)
    bias_at = (row // S).to(tl.int64) * bias_b + head * bias_h
    gate = _gate(qkvg_ptr + 3 * H * C, gate_bias_ptr + head * C, query, N, qkvg_n, C, BLOCK_C)
    gated = _load(_row_of(gated_ptr, S, gated_b, gated_s) + head * C, query, N, gated_n, C, BLOCK_C).to(tl.float32)
    d_gated_ptr = _row_of(d_gated_ptr, S, d_gated_b, d_gated_s) + head * C
    d_gated = _load(d_gated_ptr, query, N, d_gated_n, C, BLOCK_C).to(tl.float32)
    d_gate = d_gated * gated * (1.0 - gate)
    _store(dqkvg_ptr + 3 * H * C, d_gate, query, N, dqkvg_n, C, BLOCK_C)
    channel = tl.arange(0, BLOCK_C)
    partial_ptr += ((row * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * H + head) * C
    tl.store(partial_ptr + channel, tl.sum(d_gate, 0), mask=channel < C)
    at = (row * H + head).to(tl.int64) * N
    delta = tl.sum(d_gated * gated, 1)
    tl.store(delta_ptr + at + query, delta, mask=query < N)
    d_context = (d_gated * gate).to(d_context_ptr.dtype.element_ty)
    _store(d_context_ptr + at * C, d_context, query, N, C, C, BLOCK_C)

    lse = tl.load(lse_ptr + at + query, mask=query < N, other=float("inf"))
    q = _load(qkvg_ptr, query, N, qkvg_n, C, BLOCK_C)
    dq = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for first in range(0, N, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        k = _load(qkvg_ptr + H * C, key, N, qkvg_n, C, BLOCK_C)
        v = _load(qkvg_ptr + 2 * H * C, key, N, qkvg_n, C, BLOCK_C)
        logits = _logits(q, k, query, key, N, scale * _LOG2_E, bias_ptr, bias_at, bias_q, bias_k, PRECISION)
        logits += _added(mask_ptr, key, N, mask_n, MASKED)[None, :]
        probability = tl.exp2(logits - lse[:, None])
        d_probability = tl.dot(d_context, tl.trans(v), input_precision=PRECISION)
        d_logits = probability * (d_probability - delta[:, None])
        dq = tl.dot(d_logits.to(k.dtype), k, dq, input_precision=PRECISION)
    _store(dqkvg_ptr, dq * scale, query, N, dqkvg_n, C, BLOCK_C)


@triton.jit
def pair_bias_attention_key_value_gradient_kernel(
    qkvg_ptr,  # (B, S, N, 4, H, C)
    mask_ptr,  # (B, S, N)
    bias_ptr,  # (B, H, N, N) or None
    d_context_ptr,  # (B S, H, N, C)
    lse_ptr,  # (B S, H, N) fp32
    delta_ptr,  # (B S, H, N) fp32
    dqkvg_ptr,  # (B, S, N, 4, H, C); keys and values are written
    S, N, scale,
    qkvg_b, qkvg_s, qkvg_n, mask_b, mask_s, mask_n, bias_b, bias_h, bias_q, bias_k, dqkvg_b, dqkvg_s, dqkvg_n,
    H: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of a block of keys. Tiles are keys by queries. Grid (blocks, H, B S)."""
    head, row = tl.program_id(1), tl.program_id(2)
    key = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    qkvg_ptr = _row_of(qkvg_ptr, S, qkvg_b, qkvg_s) + head * C
    bias_at = (row // S).to(tl.int64) * bias_b + head * bias_h
    k = _load(qkvg_ptr + H * C, key, N, qkvg_n, C, BLOCK_C)
    v = _load(qkvg_ptr + 2 * H * C, key, N, qkvg_n, C, BLOCK_C)
    added = _added(_row_of(mask_ptr, S, mask_b, mask_s), key, N, mask_n, MASKED)
    at = (row * H + head).to(tl.int64) * N
    dk = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for first in range(0, N, BLOCK_M):
        query = first + tl.arange(0, BLOCK_M)
        q = _load(qkvg_ptr, query, N, qkvg_n, C, BLOCK_C)
        d_context = _load(d_context_ptr + at * C, query, N, C, C, BLOCK_C)
        lse = tl.load(lse_ptr + at + query, mask=query < N, other=float("inf"))
        delta = tl.load(delta_ptr + at + query, mask=query < N, other=0.0)
        logits = _logits(k, q, key, query, N, scale * _LOG2_E, bias_ptr, bias_at, bias_k, bias_q, PRECISION)
        probability = tl.exp2(logits + added[:, None] - lse[None, :])
        dv = tl.dot(probability.to(d_context.dtype), d_context, dv, input_precision=PRECISION)
        d_probability = tl.dot(v, tl.trans(d_context), input_precision=PRECISION)
        d_logits = probability * (d_probability - delta[None, :])
        dk = tl.dot(d_logits.to(q.dtype), q, dk, input_precision=PRECISION)
    dqkvg_ptr = _row_of(dqkvg_ptr, S, dqkvg_b, dqkvg_s) + head * C
    _store(dqkvg_ptr + H * C, dk * scale, key, N, dqkvg_n, C, BLOCK_C)
    _store(dqkvg_ptr + 2 * H * C, dv, key, N, dqkvg_n, C, BLOCK_C)


@triton.jit
def pair_bias_attention_bias_gradient_kernel(
    qkvg_ptr,  # (B, S, N, 4, H, C)
    mask_ptr,  # (B, S, N)
    bias_ptr,  # (B, H, N, N)
    d_context_ptr,  # (B S, H, N, C)
    lse_ptr,  # (B S, H, N) fp32
    delta_ptr,  # (B S, H, N) fp32
    partial_ptr,  # (parts, B, H, N, N) fp32, written
    S, N, scale, parts, samples,
    qkvg_b, qkvg_s, qkvg_n, mask_b, mask_s, mask_n, bias_b, bias_h, bias_q, bias_k,
    H: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a block of logits over one of the parts of the rows. Grid (blocks of both, H, B parts)."""
    blocks = tl.cdiv(N, BLOCK_N)
    head, sample, part = tl.program_id(1), tl.program_id(2) // parts, tl.program_id(2) % parts
    query = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    key = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (query < N)[:, None] & (key < N)[None, :]
    bias_ptr += sample.to(tl.int64) * bias_b + head * bias_h
    bias = tl.load(bias_ptr + query[:, None] * bias_q + key[None, :] * bias_k, mask=inside, other=0.0)
    rows = tl.cdiv(S, parts)
    first = part * rows
    qkvg_ptr += sample.to(tl.int64) * qkvg_b + first.to(tl.int64) * qkvg_s + head * C
    mask_ptr += sample.to(tl.int64) * mask_b + first.to(tl.int64) * mask_s
    at = ((sample * S + first) * H + head).to(tl.int64) * N
    d_bias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(first, tl.minimum(first + rows, S)):
        q = _load(qkvg_ptr, query, N, qkvg_n, C, BLOCK_C)
        k = _load(qkvg_ptr + H * C, key, N, qkvg_n, C, BLOCK_C)
        v = _load(qkvg_ptr + 2 * H * C, key, N, qkvg_n, C, BLOCK_C)
        d_context = _load(d_context_ptr + at * C, query, N, C, C, BLOCK_C)
        lse = tl.load(lse_ptr + at + query, mask=query < N, other=float("inf"))
        delta = tl.load(delta_ptr + at + query, mask=query < N, other=0.0)
        logits = _logits(q, k, query, key, N, scale * _LOG2_E, None, 0, 0, 0, PRECISION)
        logits += bias.to(tl.float32) * _LOG2_E + _added(mask_ptr, key, N, mask_n, MASKED)[None, :]
        d_probability = tl.dot(d_context, tl.trans(v), input_precision=PRECISION)
        d_bias += tl.exp2(logits - lse[:, None]) * (d_probability - delta[:, None])
        qkvg_ptr += qkvg_s
        mask_ptr += mask_s
        at += H * N
    target = ((part * samples + sample) * H + head).to(tl.int64) * N * N
    tl.store(partial_ptr + target + query[:, None] * N + key[None, :], d_bias, mask=inside)
