"""Reference of :mod:`benchmarks.maskrcnn.ops.selected_logits`, and code that both implementations share."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.triton_support import widen


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
    """Reference implementation of the selected logits.

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
