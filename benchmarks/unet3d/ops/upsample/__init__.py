"""The way up: a transposed convolution that doubles the volume, its channels beside those of a skip connection.

The kernel is 2x2x2 with stride 2, so no two voxels of the input meet in one of the output: it is a matrix product with
eight columns of weights a filter, whose results are dealt out to the eight corners of a voxel. Written where they
belong, they are the first half of the channels of the block's input, and need neither a pass for the bias nor one that
joins them with the skip connection.
"""

from __future__ import annotations

from benchmarks.unet3d.ops.upsample.reference import upsample_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

UPSAMPLE = Operation(
    "upsample",
    upsample_reference,
    {
        "triton": triton_kernels("benchmarks.unet3d.ops.upsample.triton:upsample"),
    },
    kernel_names=(("convolution, either way", r"^upsample_"),),
    cases="benchmarks.unet3d.ops.upsample.cases",
)
"""Signature: ``upsample(x_NCDHW, weight, bias_C, skip_NCDHW)``."""
