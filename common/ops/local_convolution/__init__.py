"""Convolution of one slab of a volume with a 3x3x3 kernel without bias, and its gradients.

The slab is padded with one plane of zeros on every side. :mod:`common.distributed.spatial.convolution` uses it to
convolve a volume that is split over ranks. Shapes: N samples, C channels, D H W slab.
"""

from __future__ import annotations

import torch

from common.ops.local_convolution.folded import folded_convolution
from common.ops.local_convolution.reference import local_convolution_reference
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import triton_unsupported


def _triton_unsupported(request: OperationRequest) -> str | None:
    if request.sizes["channels"] != 1:
        return f"the kernels take 1 input channel, not {request.sizes['channels']}"
    return triton_unsupported(request)


def _folded_unsupported(request: OperationRequest) -> str | None:
    if request.device.type != "cuda":
        return f"it is worth its while with cuDNN only, not on {request.device.type}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"measured with fp16 and bf16 only, not with {request.dtype}"
    return None


LOCAL_CONVOLUTION = Operation(
    "local_convolution",
    local_convolution_reference,
    {
        "triton": Implementation("common.ops.local_convolution.triton:triton_convolution", _triton_unsupported),
        "folded": Implementation(folded_convolution, _folded_unsupported),
    },
    kernel_names=(("convolution, either way", r"^single_channel_"),),
    cases="common.ops.local_convolution.cases",
)
"""Each implementation is a function that returns a :class:`LocalConvolution`. ``triton`` supports 1 input channel
only. On a GPU, ``folded`` and ``reference`` call cuDNN; ``folded`` computes the weight gradient differently for few
output channels."""
