"""Depthwise 3x3 convolution without bias: each channel has a kernel of its own.

At stride 1, the padding keeps height and width. The kernels compute both gradients in one pass over input and gradient,
where the library reads the gradient twice.
Shapes: N samples, C channels, H W of the input; the result is (N, C, ceil(H / stride), ceil(W / stride)).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels


def depthwise_convolution_reference(x_NCHW: Tensor, weight: Tensor, stride: int, dilation: int) -> Tensor:
    """Return the convolution of every channel with its kernel, zeros outside the image.

    Args:
        weight: (C, 1, 3, 3), dtype of the input.
        stride: 1 or 2.
        dilation: distance of the taps in pixels.
    """
    return F.conv2d(x_NCHW, weight, None, stride, dilation, dilation, x_NCHW.shape[1])


DEPTHWISE_CONVOLUTION = Operation(
    "depthwise_convolution",
    depthwise_convolution_reference,
    {"triton": triton_kernels("benchmarks.deepcam.ops.depthwise_convolution.triton:depthwise_convolution")},
    kernel_names=(("depthwise convolution", r"^depthwise_|c1_k1_nhwc|conv2d_grouped_direct"),),
    cases="benchmarks.deepcam.ops.depthwise_convolution.cases",
)
"""Implementations of :func:`depthwise_convolution_reference`, with gradients of input and weight."""
