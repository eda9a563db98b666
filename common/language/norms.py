"""Norms of decoders, computed in fp32 (fp64 for fp64), with their parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.distributed.tensor_parallel.ranks import AXIS
from common.ops.triton_support import widen


class Norm(nn.Module, ABC):
    """Norm of the last dimension.

    Attributes:
        partial_over: parameters whose gradients must be summed over mesh axes. Each tp rank normalises only its own
            tokens and has only their part of the parameters' gradients.
        initial: initial value of the weight; a bias starts with 0.
    """

    partial_over: Mapping[str, tuple[str, ...]] = {"weight": (AXIS,)}
    initial: ClassVar[float] = 1.0
    has_bias: ClassVar[bool] = False
    bias: nn.Parameter | None

    def __init__(self, features: int, epsilon: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if self.has_bias else None
        self.register_parameter("bias", bias)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""


class RMSNorm(Norm):
    """``weight * x / sqrt(mean(x^2) + epsilon)`` (Zhang and Sennrich, arXiv:1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = widen(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (normed * widen(self.weight)).to(x.dtype)


class LayerNorm1p(Norm):
    """LayerNorm ``(x - mean) / sqrt(variance + epsilon) * (1 + weight) + bias``."""

    partial_over: Mapping[str, tuple[str, ...]] = {"weight": (AXIS,), "bias": (AXIS,)}
    initial: ClassVar[float] = 0.0
    has_bias: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        assert self.bias is not None
        wide, weight, bias = widen(x), widen(self.weight), widen(self.bias)
        return F.layer_norm(wide, (wide.shape[-1],), 1.0 + weight, bias, self.epsilon).to(x.dtype)
