"""A linear layer whose matrix products are chosen by name, and whose bias the next operation may take over."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.ops.fp8_cast.reference import Fp8Tensor, Handover, Scaling
from common.ops.linear import fp8, te
from common.ops.operation import Implementation, Operation, OperationRequest

Product = Callable[..., Tensor]
"""``product(x, weight, bias or None) -> x weight^T + bias``, differentiable. In FP8 a :class:`fp8.Fp8Product`."""


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
            UnsupportedImplementation: see :func:`common.ops.operation.Operation.select`.
        """
        request = OperationRequest(self.weight.device, self.weight.dtype, {"columns": self.weight.shape[1]})
        chosen = LINEAR.select(requested, request)
        self.product = chosen.function(self.weight)
        return chosen.name

    def input_scaling(self) -> Scaling | None:
        """State of the scale of the input, for a producer that writes it in FP8; None where it is wanted in 16 bits."""
        return self.product.input_scaling() if isinstance(self.product, fp8.Fp8Product) else None

    def handover(self) -> Handover | None:
        """For the gradient of one result, whose reader writes it in FP8; None where it is wanted in 16 bits."""
        return self.product.handover() if isinstance(self.product, fp8.Fp8Product) else None

    def forward(
        self,
        x: Tensor | Fp8Tensor,
        add_bias: bool = True,
        bias_gradient: bool = True,
        handover: Handover | None = None,
    ) -> Tensor:
        """Map (..., in_features) to (..., out_features).

        Args:
            x: input, in FP8 where :meth:`input_scaling` asked for it.
            add_bias: without it the caller adds ``self.bias``.
            bias_gradient: without it the bias is added, but its gradient is left to the caller.
            handover: of :meth:`handover`, which the one reader of the result has too.
        """
        bias = None if not add_bias else self.bias if bias_gradient else self.bias.detach()
        if handover is None:
            return self.product(x, self.weight, bias)
        return self.product(x, self.weight, bias, handover)


def _reference_product(weight: Tensor) -> Product:
    return F.linear


LINEAR = Operation(
    "linear",
    _reference_product,
    {
        "fp8": Implementation(fp8.Fp8Product, fp8.unsupported, automatic=False),
        "te": Implementation(te.TeProduct, te.unsupported, automatic=False),
    },
    cases="common.ops.linear.cases",
)
"""Builders of products: ``build(weight) -> Product``. A product with state of its own (scales) is a module, and so
becomes a part of the layer. ``auto`` never changes the precision, so ``fp8`` and ``te`` are asked for by name."""
