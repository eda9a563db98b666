"""The way up: a transposed convolution that doubles the volume, its channels beside those of a skip connection.

The kernel is 2x2x2 with stride 2, so no two voxels of the input meet in one of the output: it is a matrix product with
eight columns of weights a filter, whose results are dealt out to the eight corners of a voxel. Written where they
belong, they are the first half of the channels of the block's input, and need neither a pass for the bias nor one that
joins them with the skip connection.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.unet3d.ops.upsample.plain import upsample_plain
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _upsample_triton(*args: Any) -> Tensor:
    # triton is imported only where it is used
    from benchmarks.unet3d.ops.upsample.triton import upsample

    return upsample(*args)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _upsample_triton, triton_unsupported),
    "plain": Implementation("plain", upsample_plain, always),
}
"""Signature: ``upsample(x_NCDHW, weight, bias_C, skip_NCDHW)``."""

KERNEL_NAMES = (("convolution, either way", r"^upsample_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
