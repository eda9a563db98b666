# mypy: allow-untyped-defs
"""Triton kernels of the joint network's last layer: its product, and the two products of its gradients.

Capacities are at least a fifth larger than the rows of a micro-batch, and a library's product would compute all of
them. These kernels read the number of rows on the device and skip other tiles. The product also writes the
log-sum-exp of each part of a row's columns, from the rounded logits that backward reads, so the loss does not read
the logits. The gradient of the input overwrites the input and is zero where the input is zero, as ReLU and dropout
require.

With 2.45 million rows, 512 -> 1,024, each product takes 2.6 TFLOP, 3.7 ms at 700 TFLOP/s on an H200, and moves 7.5 to
10 GB, 1.8 to 2.4 ms, meanwhile. The joint's hidden layer moves 5 GB, 1.2 ms, and the gradient of the logits 10 GB,
2.3 ms: 14.6 ms in all. Recomputing logits in backward would save 5 GB of memory and little traffic, and cost a fourth
product. Computing the gradient of the logits inside both products that read it would take four exponentials per
logit, because a tile has at most half of H, or a fourth of V: 10 billion, 2.7 ms of the special function units, and
operands from registers.

Most rows are far from every probable path, and their gradient rounds to zero. The gradient kernels get a list of the
other rows: half of all rows at first, when all paths are equally likely, and fewer as the network becomes confident.

Programs are persistent, one per multiprocessor. Neighbouring tiles have the same rows, so all but one of them read
the rows from the L2 cache; all read the weight from there.

Tiles are loaded by pointers or, where available, by the tensor memory accelerator, whose descriptors take fewer
registers and instructions. It returns zeros beyond a tensor, but also loads unused rows, whose results are ignored;
it cannot load rows of a list. Results are stored by pointers, which takes less shared memory.

Shapes: M rows from ``first``, H width, V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.rnnt.ops.transducer_loss.kernels import chosen


@triton.jit
def transducer_product_kernel(
    h,  # (M, H)
    weight,  # (V, H)
    bias_ptr,  # (V,)
    logits_ptr,  # (M, V)
    partial_ptr,  # (V / BLOCK_V, M) fp32
    end_ptr,  # number of all rows, int64
    first, M,
    H: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Write logits and partial log-sum-exps. Grid (programs,). With DESCRIBED, h and weight are descriptors."""
    count = tl.minimum(tl.maximum(tl.load(end_ptr) - first, 0), M).to(tl.int32)  # rows that exist
    across: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    depth = tl.arange(0, BLOCK_H)
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK_M) * across, tl.num_programs(0), flatten=True):
        begin_m, begin_v = tile // across * BLOCK_M, tile % across * BLOCK_V
        row, column = begin_m + tl.arange(0, BLOCK_M), begin_v + tl.arange(0, BLOCK_V)
        # indices beyond the last row or column are clamped, and their results are not stored
        read = column if V % BLOCK_V == 0 else tl.minimum(column, V - 1)
        total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        if DESCRIBED:
            for k in range(0, H, BLOCK_H):
                total = tl.dot(h.load([begin_m, k]), tl.trans(weight.load([begin_v, k])), total)
        else:
            h_ptrs = h + tl.minimum(row, count - 1).to(tl.int64)[:, None] * H + depth[None, :]
            weight_ptrs = weight + read[None, :] * H + depth[:, None]
            for k in range(0, H, BLOCK_H):
                if H % BLOCK_H == 0:
                    left, right = tl.load(h_ptrs + k), tl.load(weight_ptrs + k)
                else:
                    left = tl.load(h_ptrs + k, mask=(k + depth < H)[None, :], other=0.0)
                    right = tl.load(weight_ptrs + k, mask=(k + depth < H)[:, None], other=0.0)
                total = tl.dot(left, right, total)
        bias = tl.load(bias_ptr + read)
        rounded = (total + bias.to(tl.float32)[None, :]).to(bias_ptr.dtype.element_ty)
        exists = row < count
        mask = exists[:, None]
        if V % BLOCK_V:
            mask = mask & (column < V)[None, :]
        tl.store(logits_ptr + row.to(tl.int64)[:, None] * V + column[None, :], rounded, mask=mask)
        total = rounded.to(tl.float32)
        if V % BLOCK_V:
            total = tl.where((column < V)[None, :], total, float("-inf"))
        largest = tl.max(total, 1)
        lse = largest + tl.log(tl.sum(tl.exp(total - largest[:, None]), 1))
        tl.store(partial_ptr + tile % across * M + row, lse, mask=exists)


@triton.jit
def transducer_input_gradient_kernel(
    d_logits_ptr,  # (M, V)
    weight,  # (V, H)
    h_ptr,  # (M, H), becomes its gradient
    rank_ptr, row_ptr,  # (R,) int32
    first, M,
    H: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Replace h by its gradient in the chosen rows. Grid (programs,). With DESCRIBED, weight is a descriptor."""
    begin, count = chosen(rank_ptr, first, M)
    across: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    depth = tl.arange(0, BLOCK_V)
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK_M) * across, tl.num_programs(0)):
        begin_m, begin_h = tile // across * BLOCK_M, tile % across * BLOCK_H
        rank, column = begin_m + tl.arange(0, BLOCK_M), begin_h + tl.arange(0, BLOCK_H)
        exists = rank < count
        row = tl.load(row_ptr + begin + tl.minimum(rank, count - 1)) - first
        total = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        d_ptrs = d_logits_ptr + row.to(tl.int64)[:, None] * V + depth[None, :]
        if not DESCRIBED:
            read = column if H % BLOCK_H == 0 else tl.minimum(column, H - 1)
            weight_ptrs = weight + depth[:, None] * H + read[None, :]
        for k in range(0, V, BLOCK_V):
            if V % BLOCK_V == 0:
                left = tl.load(d_ptrs + k)
            else:
                left = tl.load(d_ptrs + k, mask=(k + depth < V)[None, :], other=0.0)
            if DESCRIBED:
                right = weight.load([k, begin_h])
            elif V % BLOCK_V == 0:
                right = tl.load(weight_ptrs + k * H)
            else:
                right = tl.load(weight_ptrs + k * H, mask=(k + depth < V)[:, None], other=0.0)
            total = tl.dot(left, right, total)
        own_ptrs = h_ptr + row.to(tl.int64)[:, None] * H + column[None, :]
        mask = exists[:, None]
        if H % BLOCK_H:
            mask = mask & (column < H)[None, :]
        own = tl.load(own_ptrs, mask=mask, other=0.0)
        tl.store(own_ptrs, tl.where(own == 0, 0.0, total).to(own.dtype), mask=mask)


@triton.jit
def transducer_weight_gradient_kernel(
    d_logits_ptr,  # (M, V)
    h_ptr,  # (M, H)
    partial_ptr,  # (shares, V, H) fp32
    rank_ptr, row_ptr,  # (R,) int32
    first, M,
    H: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write partial weight gradients of the chosen rows. Grid (ceil(V / BLOCK_V) * ceil(H / BLOCK_H), shares).

    Programs of one share of the rows run side by side.
    """
    of_first, count = chosen(rank_ptr, first, M)
    across: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    share, shares = tl.program_id(1), tl.num_programs(1)
    size = tl.cdiv(tl.cdiv(count, shares), BLOCK_M) * BLOCK_M
    begin = share * size
    end = tl.minimum(begin + size, count)
    begin_v, begin_h = tl.program_id(0) // across * BLOCK_V, tl.program_id(0) % across * BLOCK_H
    v, column = begin_v + tl.arange(0, BLOCK_V), begin_h + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    for at in range(begin, end, BLOCK_M):
        rank = at + tl.arange(0, BLOCK_M)
        exists = rank < end
        row = tl.load(row_ptr + of_first + rank, mask=exists, other=0) - first
        d_ptrs = d_logits_ptr + row.to(tl.int64)[:, None] * V + v[None, :]
        h_ptrs = h_ptr + row.to(tl.int64)[:, None] * H + column[None, :]
        exists = exists[:, None]
        if V % BLOCK_V == 0:
            left = tl.load(d_ptrs, mask=exists, other=0.0)
        else:
            left = tl.load(d_ptrs, mask=exists & (v < V)[None, :], other=0.0)
        if H % BLOCK_H == 0:
            right = tl.load(h_ptrs, mask=exists, other=0.0)
        else:
            right = tl.load(h_ptrs, mask=exists & (column < H)[None, :], other=0.0)
        total = tl.dot(tl.trans(left), right, total)
    offset = (share.to(tl.int64) * V + v)[:, None] * H + column[None, :]
    tl.store(partial_ptr + offset, total, mask=(v < V)[:, None] & (column < H)[None, :])
