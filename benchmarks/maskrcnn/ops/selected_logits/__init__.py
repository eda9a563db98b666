"""The mask head's last layer, only for the class of each region's object.

The loss uses one channel of the 1x1 convolution to all classes. This operation multiplies a region's pixels only by
the weight row of that class: 1 / K of the products, and no tensor of K channels in either direction. Slots without an
object are not read.

Shapes: R regions, P pixels of a region, in any order, C channels, K classes with background.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


def check(x_RPC: Tensor, weight_KC: Tensor, bias_K: Tensor, class_R: Tensor) -> None:
    """Check the shapes.

    Raises:
        ValueError: the shapes don't fit.
    """
    regions, _, channels = x_RPC.shape
    classes = len(weight_KC)
    if weight_KC.shape != (classes, channels) or bias_K.shape != (classes,) or class_R.shape != (regions,):
        raise ValueError(
            f"features {tuple(x_RPC.shape)}, weight {tuple(weight_KC.shape)}, bias {tuple(bias_K.shape)} and classes "
            f"{tuple(class_R.shape)} don't fit"
        )


def selected_logits_reference(x_RPC: Tensor, weight_KC: Tensor, bias_K: Tensor, class_R: Tensor) -> Tensor:
    """Return the logits of the selected classes.

    Args:
        weight_KC, bias_K: weight and bias of the last layer, in the dtype of the features.
        class_R: class of each region's object, int64; -1 for slots without an object.

    Returns:
        ``x weight[class]^T + bias[class]``, (R, P), fp32 (fp64 for fp64 features). The logits of slots without an
        object are 0 and have no gradient.

    Raises:
        ValueError: the shapes don't fit.
    """
    check(x_RPC, weight_KC, bias_K, class_R)
    there_R1, known_R = (class_R >= 0).unsqueeze(1), class_R.clamp(min=0)
    weight_RC1, bias_R1 = widen(weight_KC)[known_R].unsqueeze(2), widen(bias_K)[known_R].unsqueeze(1)
    x_RPC = torch.where(there_R1.unsqueeze(2), widen(x_RPC), 0.0)
    return torch.where(there_R1, torch.bmm(x_RPC, weight_RC1).squeeze(2) + bias_R1, 0.0)


MOST_CHANNELS = 2048
"""Maximum number of channels, which a program holds for a pixel at once."""


SELECTED_LOGITS = Operation(
    "selected_logits",
    selected_logits_reference,
    {
        "triton": triton_kernels(
            "benchmarks.maskrcnn.ops.selected_logits.triton:selected_logits", most={"channels": MOST_CHANNELS}
        ),
    },
    kernel_names=(("mask logits", r"^selected_logits_"),),
    cases="benchmarks.maskrcnn.ops.selected_logits.cases",
)
"""Signature: ``selected_logits(x_RPC, weight_KC, bias_K, class_R)``. A request has the size ``channels``."""
