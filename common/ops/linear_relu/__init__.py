"""Linear layer with bias and ReLU in the product's epilogue, and a backward pass of its own.

The gradient in front of the ReLU and its sum for the bias are one pass. Of activations only input and result are kept.
Shapes: B samples, K inputs, N outputs.
"""

from __future__ import annotations

from common.ops.implementation import Implementation, always
from common.ops.linear_relu.plain import linear_relu_torch

IMPLEMENTATIONS = {
    "torch": Implementation("torch", linear_relu_torch, always),
}
"""Signature: ``linear_relu(x_BK, weight_NK, bias_N)``."""
