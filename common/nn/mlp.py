"""Stacks of linear layers with ReLU between them.

Legend: B samples, K inputs, N outputs.
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
"""What tensor cores want the inputs of a half-precision product to be a multiple of."""


def padded_columns(columns: int) -> int:
    """``columns`` up to the next multiple of :data:`COLUMN_MULTIPLE`."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


class MLP(nn.ModuleList):
    """Linear layers, each with ReLU behind it but for the last one of a stack that ends in a logit.

    The weights are not drawn: see ``draw``.

    Args:
        inputs: of the first layer.
        widths: outputs of every layer.
        logit: whether the last layer's only output is a logit: without ReLU, and in fp32 (fp64 of fp64).

    Raises:
        ValueError: the last layer of a stack that ends in a logit has several outputs.
    """

    def __init__(self, inputs: int, widths: Sequence[int], logit: bool = False) -> None:
        if logit and widths[-1] != 1:
            raise ValueError(f"a logit is one output, not {widths[-1]}")
        with torch.device("meta"):  # nothing is drawn from the global generator
            layers = [nn.Linear(*sizes) for sizes in pairwise([inputs, *widths])]
        super().__init__(layer.to_empty(device="cpu") for layer in layers)
        self._ends_in_logit = logit
        self._linear_relu = linear_relu.LINEAR_RELU.choice("reference")
        self._logit = logit_ops.LOGIT.choice("reference")

    def linears(self) -> list[nn.Linear]:
        """The layers in order."""
        return [layer for layer in self if isinstance(layer, nn.Linear)]

    @torch.no_grad()
    def draw(self, fill: Callable[[nn.Linear], None]) -> None:
        """Let ``fill`` write weight and bias of every layer, in order."""
        for layer in self.linears():
            fill(layer)

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation for activations of ``dtype`` on the device of the weights.

        Args:
            requested: a name, or ``auto``.
            dtype: of the activations.

        Returns:
            The name chosen for the layers with ReLU; that for the logit is found in the same way.

        Raises:
            UnsupportedImplementation: see :func:`common.ops.operation.select`.
        """
        last = self.linears()[-1]
        request = OperationRequest(last.weight.device, dtype, {"inputs": last.in_features})
        self._linear_relu = linear_relu.LINEAR_RELU.select(requested, request)
        if self._ends_in_logit:
            self._logit = logit_ops.LOGIT.select(requested, request)
        return self._linear_relu.name

    @property
    def multiply_adds(self) -> int:
        """Of a sample's forward pass."""
        return sum(layer.in_features * layer.out_features for layer in self.linears())

    def forward(self, x_BK: Tensor) -> Tensor:
        """Run all layers.

        Args:
            x_BK: in the dtype of the weights. Columns beyond the first layer's inputs, which are there for alignment
                only, must be finite; they count as zeros.

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
