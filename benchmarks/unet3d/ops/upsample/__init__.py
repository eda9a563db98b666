"""Upsampling: a transposed convolution that doubles the volume, and concatenation with a skip connection.

The kernel is 2x2x2 with stride 2, so every output voxel depends on one input voxel. The convolution is a matrix
product with eight columns per filter, whose results go to the eight corners of the voxel. They are written directly
into the first half of the concatenated channels, so bias and concatenation need no separate passes.
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
