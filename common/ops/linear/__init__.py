"""A linear layer whose matrix products are chosen by name, and whose bias the next operation may take over."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.ops.implementation import Implementation, OperationRequest, always, select
from common.ops.linear import fp8

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``product(x, weight, bias or None) -> x weight^T + bias``, differentiable."""


class Linear(nn.Module):
    """``x weight^T + bias``, parameters as in ``torch.nn.Linear``.

    Args:
        in_features, out_features: columns and rows of the weight.
        device, dtype: of the parameters, which are left uninitialised.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.product: Product = F.linear

    def choose(self, requested: str) -> str:
        """Choose how products run, for activations of the weight's dtype on its device. Returns the name chosen.

        Raises:
            UnsupportedImplementation: see :func:`common.ops.implementation.select`.
        """
        request = OperationRequest(self.weight.device, self.weight.dtype, {"columns": self.weight.shape[1]})
        chosen = select(IMPLEMENTATIONS, requested, request)
        self.product = chosen.function(self.weight)
        return chosen.name

    def forward(self, x: Tensor, add_bias: bool = True, bias_gradient: bool = True) -> Tensor:
        """Map (..., in_features) to (..., out_features).

        Args:
            x: input.
            add_bias: without it the caller adds ``self.bias``.
            bias_gradient: without it the bias is added, but its gradient is left to the caller.
        """
        if not add_bias:
            return self.product(x, self.weight, None)
        return self.product(x, self.weight, self.bias if bias_gradient else self.bias.detach())


def _torch_product(weight: Tensor) -> Product:
    return F.linear


IMPLEMENTATIONS = {
    "torch": Implementation("torch", _torch_product, always),
    "fp8": Implementation("fp8", fp8.Fp8Product, fp8.unsupported),
}
"""Builders of products: ``build(weight) -> Product``. A product with state of its own (scales) is a module, and so
becomes a part of the layer. ``fp8`` comes last: ``auto`` never changes the precision."""
