"""The network's last layer: a 1x1x1 convolution with bias from a few channels to a class or three.

A voxel has fewer outputs than a tensor core's smallest tile has columns, for which cuDNN has nothing but its general
kernels. The layer is bound by memory: its input is read once in forward, read and its gradient written in backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.unet3d.ops.output_convolution.plain import MOST_CHANNELS, output_convolution_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported


def _triton_unsupported(request: OperationRequest) -> str | None:
    if request.sizes["channels"] > MOST_CHANNELS:
        return f"the kernels hold up to {MOST_CHANNELS} channels, not {request.sizes['channels']}"
    return triton_unsupported(request)


def _output_convolution_triton(*args: Any) -> Tensor:
    # triton is imported only where it is used
    from benchmarks.unet3d.ops.output_convolution.triton import output_convolution

    return output_convolution(*args)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _output_convolution_triton, _triton_unsupported),
    "torch": Implementation("torch", output_convolution_torch, always),
}
"""Signature: ``output_convolution(x_NCDHW, weight, bias_K)``; a request's size is ``channels``."""

KERNEL_NAMES = (("convolution, either way", r"^output_convolution_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
