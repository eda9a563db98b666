"""Stacks of linear layers with ReLU between them.

Shapes: B samples, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.ops import linear_relu
from common.ops import logit as logit_ops
from common.ops.operation import OperationRequest

COLUMN_MULTIPLE = 8
"""Multiple that the input columns of a half-precision product should have, for tensor cores."""


def padded_columns(columns: int) -> int:
    """Round ``columns`` up to a multiple of :data:`COLUMN_MULTIPLE`."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


class MLP(nn.ModuleList):
    """Linear layers, each followed by ReLU, except the last one if it computes a logit.

    The weights are uninitialised until :meth:`draw`.

    Args:
        inputs: inputs of the first layer.
        widths: number of outputs of every layer.
        logit: whether the single output of the last layer is a logit: without ReLU, in fp32 (in fp64 for fp64
            inputs).

    Raises:
        ValueError: ``logit`` is set and the last layer has several outputs.
    """

    def __init__(self, inputs: int, widths: Sequence[int], logit: bool = False) -> None:
        if logit and widths[-1] != 1:
            raise ValueError(f"a logit is one output, not {widths[-1]}")
        with torch.device("meta"):  # avoids random numbers from the global generator
            layers = [nn.Linear(*sizes) for sizes in pairwise([inputs, *widths])]
        super().__init__(layer.to_empty(device="cpu") for layer in layers)
        self._ends_in_logit = logit
        self._linear_relu = linear_relu.LINEAR_RELU.choice("reference")
        self._logit = logit_ops.LOGIT.choice("reference")

    def linears(self) -> list[nn.Linear]:
        """Return the layers in order."""
        return [layer for layer in self if isinstance(layer, nn.Linear)]

    @torch.no_grad()
    def draw(self, fill: Callable[[nn.Linear], None]) -> None:
        """Call ``fill`` for every layer in order, to initialise its weight and bias."""
        for layer in self.linears():
            fill(layer)

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementations; see :meth:`common.nn.choice.Choosing.choose`.

        Returns:
            The name of the implementation of the layers with ReLU. The one of the logit is chosen in the same way.
        """
        last = self.linears()[-1]
        request = OperationRequest(last.weight.device, dtype, {"inputs": last.in_features})
        self._linear_relu = linear_relu.LINEAR_RELU.select(requested, request)
        if self._ends_in_logit:
            self._logit = logit_ops.LOGIT.select(requested, request)
        return self._linear_relu.name

    @property
    def multiply_adds(self) -> int:
        """Number of multiply-adds of the forward pass of one sample."""
        return sum(layer.in_features * layer.out_features for layer in self.linears())

    def forward(self, x_BK: Tensor) -> Tensor:
        """Run all layers.

        Args:
            x_BK: input in the dtype of the weights. It may have additional columns for alignment, which must be
                finite and are multiplied by zero.

        Returns:
            (B, N of the last layer) in the dtype of the weights, or logits (B,).
        """
        layers = self.linears()
        for layer in layers[:-1] if self._ends_in_logit else layers:
            weight = layer.weight
            if x_BK.shape[1] > layer.in_features:
                weight = F.pad(weight, (0, x_BK.shape[1] - layer.in_features))
            x_BK = self._linear_relu.function(x_BK, weight, layer.bias)
        if self._ends_in_logit:
            x_BK = self._logit.function(x_BK, layers[-1].weight, layers[-1].bias)
        return x_BK

    def extra_repr(self) -> str:
        return f"implementation={self._linear_relu.name}"
