"""Stacks of linear layers with ReLU between them.

Legend: B samples, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.ops import linear_relu as ops
from common.ops.implementation import OperationRequest, select
from common.ops.triton_support import widen

COLUMN_MULTIPLE = 8
"""What tensor cores want the inputs of a half-precision product to be a multiple of."""


def padded_columns(columns: int) -> int:
    """``columns`` up to the next multiple of :data:`COLUMN_MULTIPLE`."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


class MLP(nn.ModuleList):
    """Linear layers, each with ReLU behind it but for the last one of a stack that ends in logits.

    The weights are not drawn: see ``draw``.

    Args:
        inputs: of the first layer.
        widths: outputs of every layer.
        logits: whether the last layer has no ReLU; it is computed in fp32 (fp64 of fp64) then, as is its result.
    """

    def __init__(self, inputs: int, widths: Sequence[int], logits: bool = False) -> None:
        with torch.device("meta"):  # nothing is drawn from the global generator
            layers = [nn.Linear(*sizes) for sizes in pairwise([inputs, *widths])]
        super().__init__(layer.to_empty(device="cpu") for layer in layers)
        self._logits = logits
        self._linear_relu = ops.IMPLEMENTATIONS["torch"]

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
            The name chosen.

        Raises:
            UnsupportedImplementation: see :func:`common.ops.implementation.select`.
        """
        request = OperationRequest(self.linears()[0].weight.device, dtype)
        self._linear_relu = select(ops.IMPLEMENTATIONS, requested, request)
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
            (B, N of the last layer); logits in fp32, all else in the dtype of the weights.
        """
        layers = self.linears()
        for layer in layers[:-1] if self._logits else layers:
            weight = layer.weight
            if x_BK.shape[1] > layer.in_features:
                weight = F.pad(weight, (0, x_BK.shape[1] - layer.in_features))
            x_BK = self._linear_relu.function(x_BK, weight, layer.bias)
        if self._logits:
            last = layers[-1]
            x_BK = F.linear(widen(x_BK), widen(last.weight), widen(last.bias))
        return x_BK

    def extra_repr(self) -> str:
        return f"implementation={self._linear_relu.name}"
