"""The network's last layer: a 1x1x1 convolution with bias from a few channels to a class or three.

A voxel has fewer outputs than a tensor core's smallest tile has columns, for which cuDNN has nothing but its general
kernels. The layer is bound by memory: its input is read once in forward, read and its gradient written in backward.
"""

from __future__ import annotations

from benchmarks.unet3d.ops.output_convolution.reference import MOST_CHANNELS, output_convolution_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

OUTPUT_CONVOLUTION = Operation(
    "output_convolution",
    output_convolution_reference,
    {
        "triton": triton_kernels(
            "benchmarks.unet3d.ops.output_convolution.triton:output_convolution", most={"channels": MOST_CHANNELS}
        ),
    },
    kernel_names=(("convolution, either way", r"^output_convolution_"),),
    cases="benchmarks.unet3d.ops.output_convolution.cases",
)
"""Signature: ``output_convolution(x_NCDHW, weight, bias_K)``; a request's size is ``channels``."""
