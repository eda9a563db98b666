"""Cast of a network's parameters to the dtype of its activations."""

from __future__ import annotations

import torch
from torch import nn


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert weights and biases of convolutions and linear layers to ``dtype``, the dtype of the activations.

    Other parameters, such as those of batch norms, stay fp32 unless ``dtype`` is fp64. This replaces the data of the
    parameters, so call it before an optimizer is created.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) or dtype == torch.float64:
            module.to(dtype)
