"""The mask head's last layer for the class of each region's object alone.

The loss looks at one of the channels that a 1x1 convolution to all classes gives. Here a region's pixels meet the one
row of the weight that they need: 1 / K of the products, and no tensor of K channels either way. Slots without an object
are not read.

Legend: R regions, P pixels of a region, in any order, C channels, K classes with background.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.maskrcnn.ops.selected_logits.plain import selected_logits_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported

MOST_CHANNELS = 2048
"""What a program holds of a pixel at once."""


def _unsupported(request: OperationRequest) -> str | None:
    if request.sizes["channels"] > MOST_CHANNELS:
        return f"{request.sizes['channels']} channels of a pixel are more than {MOST_CHANNELS}"
    return triton_unsupported(request)


def _selected_logits_triton(x_RPC: Tensor, weight_KC: Tensor, bias_K: Tensor, class_R: Tensor) -> Tensor:
    # triton is imported only where it is used
    from benchmarks.maskrcnn.ops.selected_logits.triton import selected_logits

    return selected_logits(x_RPC, weight_KC, bias_K, class_R)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _selected_logits_triton, _unsupported),
    "torch": Implementation("torch", selected_logits_torch, always),
}
"""Signature: ``selected_logits(x_RPC, weight_KC, bias_K, class_R)``. Sizes of a request: ``channels``."""

KERNEL_NAMES = (("mask logits", r"^selected_logits_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
