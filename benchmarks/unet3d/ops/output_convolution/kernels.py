# mypy: allow-untyped-defs
"""Triton kernels of a 1x1x1 convolution from C channels to K <= 16 classes over N samples of V voxels.

The input is (N, V, C) in memory, the logits are (N, K, V): every class is a separate plane, which a warp writes and
the loss reads in whole cache lines. Tiles of logits are transposed, classes by voxels, and padded to the 16 rows of a
tensor core's tile. Backward reads input and gradient once and writes dx. Each program keeps its part of the gradients
of weight and bias in registers until its end.

At 7 samples of 128^3 voxels, C = 32, K = 3, 16 bit: forward 1.03 GB, 0.24 ms at 4.3 TB/s on an H200; backward 1.97
GB, 0.46 ms.
"""

from __future__ import annotations

import triton
import triton.language as tl

CLASSES: tl.constexpr = tl.constexpr(16)


@triton.jit
def _weight(weight_ptr, K, C, BLOCK_C: tl.constexpr):
    """Load the weight as (16, BLOCK_C), padded with zeros."""
    class_, channel = tl.arange(0, CLASSES), tl.arange(0, BLOCK_C)
    inside = (class_ < K)[:, None] & (channel < C)[None, :]
    return tl.load(weight_ptr + class_[:, None] * C + channel[None, :], mask=inside, other=0.0)


@triton.jit
def _input_tile(V, C, voxel, BLOCK_C: tl.constexpr):
    """Return offsets and mask of a tile (voxels, BLOCK_C) of this program's sample."""
    channel = tl.arange(0, BLOCK_C)
    place = (tl.program_id(1).to(tl.int64) * V + voxel)[:, None] * C + channel[None, :]
    return place, (voxel < V)[:, None] & (channel < C)[None, :]


@triton.jit
def output_convolution_kernel(
    x_ptr,  # (N, V, C)
    weight_ptr,  # (K, C)
    bias_ptr,  # (K,)
    logits_ptr,  # (N, K, V)
    V, K, C,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute logits. Grid (ceil(voxels / BLOCK_V), N)."""
    voxel = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    place, inside = _input_tile(V, C, voxel, BLOCK_C)
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    class_ = tl.arange(0, CLASSES)
    logits = tl.dot(_weight(weight_ptr, K, C, BLOCK_C), tl.trans(x), input_precision=PRECISION)
    logits += tl.load(bias_ptr + class_, mask=class_ < K, other=0.0).to(tl.float32)[:, None]
    target = (tl.program_id(1).to(tl.int64) * K + class_)[:, None] * V + voxel[None, :]
    mask = (class_ < K)[:, None] & (voxel < V)[None, :]
    tl.store(logits_ptr + target, logits.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def output_convolution_backward_kernel(
    dlogits_ptr,  # (N, K, V) or (N, V, K)
    x_ptr,  # (N, V, C)
    weight_ptr,  # (K, C)
    dx_ptr,  # (N, V, C)
    dweight_ptr,  # (N * programs, K, C) fp32
    dbias_ptr,  # (N * programs, K) fp32
    V, K, C, voxel_stride, class_stride,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute gradients; a program takes every programs-th block of its sample. Grid (programs, N)."""
    weight = _weight(weight_ptr, K, C, BLOCK_C)
    class_, channel = tl.arange(0, CLASSES), tl.arange(0, BLOCK_C)
    dweight = tl.zeros((CLASSES, BLOCK_C), tl.float32)
    dbias = tl.zeros((CLASSES, BLOCK_V), tl.float32)
    dlogits_ptr += tl.program_id(1).to(tl.int64) * V * K
    for index in tl.range(tl.program_id(0), tl.cdiv(V, BLOCK_V), tl.num_programs(0), num_stages=STAGES):
        voxel = index * BLOCK_V + tl.arange(0, BLOCK_V)
        place, inside = _input_tile(V, C, voxel, BLOCK_C)
        x = tl.load(x_ptr + place, mask=inside, other=0.0)
        source = class_.to(tl.int64)[:, None] * class_stride + voxel.to(tl.int64)[None, :] * voxel_stride
        mask = (class_ < K)[:, None] & (voxel < V)[None, :]
        dlogits = tl.load(dlogits_ptr + source, mask=mask, other=0.0)
        dx = tl.dot(tl.trans(dlogits), weight, input_precision=PRECISION)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dweight = tl.dot(dlogits, x, dweight, input_precision=PRECISION)
        dbias += dlogits.to(tl.float32)
    share = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    inside = (class_ < K)[:, None] & (channel < C)[None, :]
    tl.store(dweight_ptr + (share * K + class_)[:, None] * C + channel[None, :], dweight, mask=inside)
    tl.store(dbias_ptr + share * K + class_, tl.sum(dbias, 1), mask=class_ < K)
