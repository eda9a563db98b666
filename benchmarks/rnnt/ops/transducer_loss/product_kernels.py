# mypy: allow-untyped-defs
"""Triton kernels of the joint network's last layer: its product, and the two products of its gradients.

Capacities are a fifth and more above what a micro-batch has. A library's product runs over all of it; here the number
of rows that exist is read on the device, and tiles beyond it cost nothing. The product leaves of every row the
log-sum-exp of each part of its columns, so that the logits, which are rounded first as backward will read them, need
not be read for the loss. The gradient of the input is written into its place, where the input is zero as zero, which is
what ReLU and dropout in front of it would do in a pass of their own.

Of 2.45 million rows, 512 -> 1,024, each product is 2.6 TFLOP, 3.7 ms at 700 TFLOP/s on an H200, and moves 7.5 to 10 GB,
1.8 to 2.4 ms, meanwhile. Programs stay, one for each multiprocessor, and walk over tiles of which those next to each
other have the same rows, so that these come out of the L2 cache for all but one of them, as the weight does.

Legend: M rows, beginning with ``first``, H width, V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.rnnt.ops.transducer_loss.kernels import existing


@triton.jit
def transducer_product_kernel(
    h_ptr,  # (M, H)
    weight_ptr,  # (V, H)
    bias_ptr,  # (V,)
    logits_ptr,  # (M, V)
    partial_ptr,  # (V / BLOCK_V, M) fp32
    end_ptr,  # number of all rows, int64
    first, M,
    H: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Grid (programs,)."""
    count = existing(end_ptr, first, M)
    across: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    depth = tl.arange(0, BLOCK_H)
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK_M) * across, tl.num_programs(0), flatten=FLATTEN):
        row = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile % across * BLOCK_V + tl.arange(0, BLOCK_V)
        # a lane beyond the last row or column reads the last one again, and stores nothing
        h_ptrs = h_ptr + tl.minimum(row, count - 1).to(tl.int64)[:, None] * H + depth[None, :]
        read = column if V % BLOCK_V == 0 else tl.minimum(column, V - 1)
        weight_ptrs = weight_ptr + read[None, :] * H + depth[:, None]
        logits = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        for k in range(0, H, BLOCK_H):
            if H % BLOCK_H == 0:
                h, weight = tl.load(h_ptrs + k), tl.load(weight_ptrs + k)
            else:
                h = tl.load(h_ptrs + k, mask=(k + depth < H)[None, :], other=0.0)
                weight = tl.load(weight_ptrs + k, mask=(k + depth < H)[:, None], other=0.0)
            logits = tl.dot(h, weight, logits)
        bias = tl.load(bias_ptr + read).to(tl.float32)
        rounded = (logits + bias[None, :]).to(logits_ptr.dtype.element_ty)
        exists = row < count
        place = logits_ptr + row.to(tl.int64)[:, None] * V + column[None, :]
        logits = rounded.to(tl.float32)
        if V % BLOCK_V == 0:
            tl.store(place, rounded, mask=exists[:, None])
        else:
            tl.store(place, rounded, mask=exists[:, None] & (column < V)[None, :])
            logits = tl.where((column < V)[None, :], logits, float("-inf"))
        largest = tl.max(logits, 1)
        lse = largest + tl.log(tl.sum(tl.exp(logits - largest[:, None]), 1))
        tl.store(partial_ptr + tile % across * M + row, lse, mask=exists)


@triton.jit
def transducer_input_gradient_kernel(
    d_logits_ptr,  # (M, V)
    weight_ptr,  # (V, H)
    h_ptr,  # (M, H), becomes its gradient
    end_ptr,  # number of all rows, int64
    first, M,
    H: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Grid (programs,)."""
    count = existing(end_ptr, first, M)
    across: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    depth = tl.arange(0, BLOCK_V)
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK_M) * across, tl.num_programs(0), flatten=FLATTEN):
        row = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile % across * BLOCK_H + tl.arange(0, BLOCK_H)
        d_ptrs = d_logits_ptr + tl.minimum(row, count - 1).to(tl.int64)[:, None] * V + depth[None, :]
        read = column if H % BLOCK_H == 0 else tl.minimum(column, H - 1)
        weight_ptrs = weight_ptr + depth[:, None] * H + read[None, :]
        dh = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        for k in range(0, V, BLOCK_V):
            if V % BLOCK_V == 0:
                d, weight = tl.load(d_ptrs + k), tl.load(weight_ptrs + k * H)
            else:
                d = tl.load(d_ptrs + k, mask=(k + depth < V)[None, :], other=0.0)
                weight = tl.load(weight_ptrs + k * H, mask=(k + depth < V)[:, None], other=0.0)
            dh = tl.dot(d, weight, dh)
        place = h_ptr + row.to(tl.int64)[:, None] * H + column[None, :]
        mask = (row < count)[:, None]
        if H % BLOCK_H:
            mask = mask & (column < H)[None, :]
        h = tl.load(place, mask=mask, other=0.0)
        tl.store(place, tl.where(h == 0, 0.0, dh).to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def transducer_weight_gradient_kernel(
    d_logits_ptr,  # (M, V)
    h_ptr,  # (M, H)
    partial_ptr,  # (shares, V, H) fp32
    end_ptr,  # number of all rows, int64
    first, M,
    H: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (V / BLOCK_V * H / BLOCK_H, shares): those of one share of the rows run side by side."""
    count = existing(end_ptr, first, M)
    across: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    share, shares = tl.program_id(1), tl.num_programs(1)
    size = tl.cdiv(tl.cdiv(count, shares), BLOCK_M) * BLOCK_M
    begin = share * size
    end = tl.minimum(begin + size, count)
    v = tl.program_id(0) // across * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.program_id(0) % across * BLOCK_H + tl.arange(0, BLOCK_H)
    row = begin + tl.arange(0, BLOCK_M)
    d_ptrs = d_logits_ptr + row.to(tl.int64)[:, None] * V + v[None, :]
    h_ptrs = h_ptr + row.to(tl.int64)[:, None] * H + column[None, :]
    total = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    for at in range(begin, end, BLOCK_M):
        exists = (at + tl.arange(0, BLOCK_M) < end)[:, None]
        if V % BLOCK_V == 0:
            d = tl.load(d_ptrs, mask=exists, other=0.0)
        else:
            d = tl.load(d_ptrs, mask=exists & (v < V)[None, :], other=0.0)
        if H % BLOCK_H == 0:
            h = tl.load(h_ptrs, mask=exists, other=0.0)
        else:
            h = tl.load(h_ptrs, mask=exists & (column < H)[None, :], other=0.0)
        total = tl.dot(tl.trans(d), h, total)
        d_ptrs += BLOCK_M * V
        h_ptrs += BLOCK_M * H
    place = (share.to(tl.int64) * V + v)[:, None] * H + column[None, :]
    tl.store(partial_ptr + place, total, mask=(v < V)[:, None] & (column < H)[None, :])
