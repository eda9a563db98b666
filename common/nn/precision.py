"""Which parameters of a network have the dtype of its activations."""

from __future__ import annotations

import torch
from torch import nn


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Store weights and biases of convolutions and linear layers in ``dtype``, which the activations then have too.

    Batch norms stay fp32, except beside fp64. Replaces the data of the parameters: call it before an optimizer takes
    them.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) or dtype == torch.float64:
            module.to(dtype)
