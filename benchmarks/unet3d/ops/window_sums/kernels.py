"""Triton kernels of :mod:`benchmarks.unet3d.ops.window_sums`. Both are bound by memory: each value is read once."""

# mypy: disable-error-code=no-untyped-def
# (Triton kernels take pointers and constexpr values, for which there are no types.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_window_kernel(
    sums_ptr,  # (D, H, W, K), W and K contiguous
    logits_ptr,  # (K, D, H, W)
    depth_ptr, height_ptr, width_ptr,  # importance: (D,), (H,), (W,)
    rows,  # D * H
    sums_stride_d, sums_stride_h,
    stride_k, stride_d, stride_h, stride_w,
    H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows of W * K columns. Grid (rows / BLOCK_R, W * K / BLOCK_C). PACKED: logits have W and K contiguous too."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_row, inside_column = row < rows, column < W * K
    inside = inside_row[:, None] & inside_column[None, :]
    d, h = row // H, row % H
    w, k = column // K, column % K
    row_weight = tl.load(depth_ptr + d, mask=inside_row, other=0.0) * tl.load(
        height_ptr + h, mask=inside_row, other=0.0
    )
    weight = row_weight[:, None] * tl.load(width_ptr + w, mask=inside_column, other=0.0)[None, :]

    from_row = d.to(tl.int64) * stride_d + h * stride_h
    if PACKED:
        logit_place = from_row[:, None] + column[None, :]
    else:
        logit_place = from_row[:, None] + (k.to(tl.int64) * stride_k + w * stride_w)[None, :]
    logits = tl.load(logits_ptr + logit_place, mask=inside, other=0.0).to(weight.dtype)
    place = (d.to(tl.int64) * sums_stride_d + h * sums_stride_h)[:, None] + column[None, :]
    sums = tl.load(sums_ptr + place, mask=inside, other=0.0)
    tl.store(sums_ptr + place, sums + logits * weight, mask=inside)


# Volumes have all kinds of sizes: one kernel for all of them, compiled by the warm-up, and none while the clock runs.
@triton.jit(
    do_not_specialize=["voxels", "sums_stride_d", "sums_stride_h", "H", "W"],
    do_not_specialize_on_alignment=["sums_ptr", "label_ptr", "counts_ptr"],
)
def count_classes_kernel(
    sums_ptr,  # (D, H, W, K), W and K contiguous
    label_ptr,  # (D, H, W) uint8, contiguous
    counts_ptr,  # (K, 3) int64: intersection, predicted, labelled
    voxels,
    sums_stride_d, sums_stride_h, H, W,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (voxels / BLOCK,). Integer sums, so that the order of the atomics changes nothing."""
    voxel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = voxel < voxels
    row = voxel // W
    d = (row // H).to(tl.int64)
    place = d * sums_stride_d + (row % H) * sums_stride_h + (voxel % W) * K
    best = tl.load(sums_ptr + place, mask=inside, other=0.0)
    predicted = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(1, K):
        value = tl.load(sums_ptr + place + k, mask=inside, other=0.0)
        # NaN is the largest, as in torch.argmax
        better = (value > best) | ((value != value) & (best == best))
        best = tl.where(better, value, best)
        predicted = tl.where(better, k, predicted)
    label = tl.load(label_ptr + voxel, mask=inside, other=0).to(tl.int32)
    for k in tl.static_range(K):
        is_predicted, is_labelled = inside & (predicted == k), inside & (label == k)
        both = tl.sum((is_predicted & is_labelled).to(tl.int32), 0)
        tl.atomic_add(counts_ptr + 3 * k, both.to(tl.int64), sem="relaxed")
        tl.atomic_add(counts_ptr + 3 * k + 1, tl.sum(is_predicted.to(tl.int32), 0).to(tl.int64), sem="relaxed")
        tl.atomic_add(counts_ptr + 3 * k + 2, tl.sum(is_labelled.to(tl.int32), 0).to(tl.int64), sem="relaxed")
