"""Convolution that also returns the moments of its result, to save the next batch norm a pass over it.

``convolution`` returns ``(y, moments)``. The moments are the sums of y and of its square over N, H, W, fp32 (2, 1, C),
for the operations of :mod:`common.ops.batch_norm`, or None if they would cost more time than they save. The reference
always returns None; ``cudnn`` computes moments from the accumulators of the convolution.
Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.libraries import CUDNN_FRONTEND
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import no_triton


def convolution_reference(x_NCHW: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor | None]:
    """Compute a square 2-D convolution without bias, dilation or groups.

    Args:
        weight: (C out, C in, kernel, kernel), dtype of the input.
        stride, padding: values for both height and width.

    Returns:
        The result, and None instead of its moments.
    """
    return F.conv2d(x_NCHW, weight, stride=stride, padding=padding), None


def _cudnn_unsupported(request: OperationRequest) -> str | None:
    if request.device.type != "cuda":
        return f"cuDNN needs a CUDA device, not {request.device.type}"
    if request.dtype != torch.float16:
        return f"cuDNN takes moments of fp16 convolutions only, not of {request.dtype}"
    if torch.cuda.get_device_capability(request.device)[0] not in (8, 9):
        return "cuDNN takes moments on compute capability 8.x and 9.x only"
    if request.sizes["channels"] % 8:
        return f"{request.sizes['channels']} channels are not a multiple of 8"
    if not torch.backends.cudnn.is_available():
        return "PyTorch has no cuDNN"
    return CUDNN_FRONTEND.unavailable() or no_triton(request.device)  # our kernels read the moments


CONVOLUTION = Operation(
    "convolution",
    convolution_reference,
    {
        # not automatic: cuDNN sums the moments with atomics, so that two runs differ in the last bits
        "cudnn": Implementation("common.ops.convolution.cudnn:convolution", _cudnn_unsupported, automatic=False),
    },
)
