"""The reference of :mod:`benchmarks.maskrcnn.ops.selected_logits`, and what both have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.triton_support import widen


def check(x_RPC: Tensor, weight_KC: Tensor, bias_K: Tensor, class_R: Tensor) -> None:
    """Refuse what does not fit together.

    Raises:
        ValueError: the shapes don't.
    """
    regions, _, channels = x_RPC.shape
    classes = len(weight_KC)
    if weight_KC.shape != (classes, channels) or bias_K.shape != (classes,) or class_R.shape != (regions,):
        raise ValueError(
            f"features {tuple(x_RPC.shape)}, weight {tuple(weight_KC.shape)}, bias {tuple(bias_K.shape)} and classes "
            f"{tuple(class_R.shape)} don't fit"
        )


def selected_logits_reference(x_RPC: Tensor, weight_KC: Tensor, bias_K: Tensor, class_R: Tensor) -> Tensor:
    """Reference implementation.

    Args:
        x_RPC: features.
        weight_KC, bias_K: of the last layer, in the dtype of the features.
        class_R: of each region's object, int64; -1 where a slot holds none.

    Returns:
        ``x weight[class]^T + bias[class]``, (R, P), fp32 (fp64 of fp64); 0 in slots without an object, which give and
        get no gradient.

    Raises:
        ValueError: the shapes don't fit.
    """
    check(x_RPC, weight_KC, bias_K, class_R)
    there_R1, known_R = (class_R >= 0).unsqueeze(1), class_R.clamp(min=0)
    weight_RC1, bias_R1 = widen(weight_KC)[known_R].unsqueeze(2), widen(bias_K)[known_R].unsqueeze(1)
    x_RPC = torch.where(there_R1.unsqueeze(2), widen(x_RPC), 0.0)
    return torch.where(there_R1, torch.bmm(x_RPC, weight_RC1).squeeze(2) + bias_R1, 0.0)
