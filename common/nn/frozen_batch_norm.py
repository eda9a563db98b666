"""Batch norm that never changes: a scale and a shift per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.nn.frozen import mark_frozen


class FrozenBatchNorm2d(nn.Module):
    """``y = x s + b`` per channel, with ``s = weight / sqrt(running_var + eps)`` and ``b = bias - running_mean s``.

    The four tensors are buffers with the names of ``torch.nn.BatchNorm2d``, marked as frozen. They stay fp32 for
    every dtype of the activations except fp64. Loading a state removes ``num_batches_tracked``.

    Args:
        channels: C.
        eps: added to the variance; may be 0.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        mark_frozen(self, ["weight", "bias", "running_mean", "running_var"])

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Return ``s`` and ``b``, each (C,), in the dtype of the buffers."""
        scale_C = self.weight * torch.rsqrt(self.running_var + self.eps)
        return scale_C, self.bias - self.running_mean * scale_C

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return ``x s + b`` in the shape and dtype of ``x_NCHW``."""
        scale_C, shift_C = self.scale_and_shift()
        return (x_NCHW * scale_C.view(-1, 1, 1) + shift_C.view(-1, 1, 1)).to(x_NCHW.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
