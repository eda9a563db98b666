"""Linear layer whose implementation is chosen by name, and whose bias the next operation can add instead."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.ops.fp8_cast.reference import Fp8Tensor, Handover, Scaling
from common.ops.linear import fp8, te
from common.ops.operation import Implementation, Operation, OperationRequest

Product = Callable[..., Tensor]
"""Signature: ``product(x, weight, bias or None)``. Returns ``x weight^T + bias`` with autograd. In FP8 it is a
:class:`fp8.Fp8LinearProduct`."""


class Linear(nn.Module):
    """A linear layer, ``x weight^T + bias``, with the parameters of ``torch.nn.Linear``.

    Args:
        in_features, out_features: columns and rows of the weight.
        device, dtype: device and dtype of the parameters, which are not initialised.
        bias: whether the layer has a bias.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.product: Product = F.linear

    def choose(self, requested: str) -> str:
        """Choose the implementation of the products and return its name.

        The parameters must have their final device and dtype.

        Raises:
            UnsupportedImplementation: see :func:`common.ops.operation.Operation.select`.
        """
        request = OperationRequest(self.weight.device, self.weight.dtype, {"columns": self.weight.shape[1]})
        chosen = LINEAR.select(requested, request)
        self.product = chosen.function(self.weight)
        return chosen.name

    def input_scaling(self) -> Scaling | None:
        """Return the scaling state for a producer that writes the input in FP8; None if it must write 16 bits."""
        return self.product.input_scaling() if isinstance(self.product, fp8.Fp8LinearProduct) else None

    def handover(self) -> Handover | None:
        """Return a handover for a consumer that writes one result's gradient in FP8; None if it must write 16 bits."""
        return self.product.handover() if isinstance(self.product, fp8.Fp8LinearProduct) else None

    def without_bias(self, x: Tensor | Fp8Tensor) -> tuple[Tensor, Handover | None]:
        """Return the product without the bias, and the handover for its only consumer, which adds ``self.bias``."""
        handover = self.handover()
        return self(x, add_bias=False, handover=handover), handover

    def forward(
        self,
        x: Tensor | Fp8Tensor,
        add_bias: bool = True,
        bias_gradient: bool = True,
        handover: Handover | None = None,
    ) -> Tensor:
        """Map (..., in_features) to (..., out_features).

        Args:
            x: input; an FP8 tensor only if :meth:`input_scaling` returned a state.
            add_bias: False if the caller adds ``self.bias``.
            bias_gradient: False if the bias is added here but the caller computes its gradient.
            handover: result of :meth:`handover`, which is also passed to the only consumer of the result.
        """
        bias: Tensor | None = self.bias if add_bias else None
        if bias is not None and not bias_gradient:
            bias = bias.detach()
        if handover is None:
            return self.product(x, self.weight, bias)
        return self.product(x, self.weight, bias, handover)


def _reference_product(weight: Tensor) -> Product:
    return F.linear


LINEAR = Operation(
    "linear",
    _reference_product,
    {
        "fp8": Implementation(fp8.Fp8LinearProduct, fp8.unsupported, automatic=False),
        "te": Implementation(te.TeProduct, te.unsupported, automatic=False),
    },
    cases="common.ops.linear.cases",
)
"""Functions ``build(weight) -> Product``. A product with state (scales) is a module, and so becomes a submodule of the
layer. ``auto`` never changes the precision, so ``fp8`` and ``te`` must be requested by name."""

IN_FP8 = ("fp8", "te")
"""Implementations that multiply in FP8."""
