"""The convolution of one slab by itself, forward and gradients, and its implementations.

3x3x3, padded with a plane of zeros on every side, without bias. :mod:`common.distributed.spatial.convolution` makes of
it the convolution of a whole volume where it is split. Shapes: N samples, C channels, D H W slab.
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
"""``function`` returns a :class:`LocalConvolution`. Triton's is for 1 input channel. On a GPU
``folded`` and ``reference`` call cuDNN; ``folded`` computes the weight's gradient in another way where there are few
output channels."""
