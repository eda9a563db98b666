"""Layer norm with a preceding residual addition, around :mod:`common.ops.add_layer_norm`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.ops import add_layer_norm as ops
from common.ops.operation import OperationRequest


class LayerNorm(nn.Module):
    """Residual addition and layer norm. Parameters are named as in ``torch.nn.LayerNorm``.

    Args:
        features: C.
        eps: added to the variance.
    """

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self._add_layer_norm = ops.ADD_LAYER_NORM.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """See :meth:`common.nn.choice.Choosing.choose`."""
        request = OperationRequest(self.weight.device, dtype, {"features": self.weight.numel()})
        self._add_layer_norm = ops.ADD_LAYER_NORM.select(requested, request)
        return self._add_layer_norm.name

    def forward(
        self, x_RC: Tensor, residual_RC: Tensor | None = None, *, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum ``x + residual + added`` and the normalised sum, (R, C) each.

        ``added`` (C,) is added to every row. See
        :func:`common.ops.add_layer_norm.reference.add_layer_norm_reference`.
        """
        result: tuple[Tensor, Tensor] = self._add_layer_norm.function(
            x_RC, residual_RC, self.weight, self.bias, self.eps, added_C=added
        )
        return result

    def extra_repr(self) -> str:
        """Sizes and the implementation."""
        return f"{self.weight.numel()}, eps={self.eps}, implementation={self._add_layer_norm.name}"
