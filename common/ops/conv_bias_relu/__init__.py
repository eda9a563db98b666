"""Convolution, bias, residual and ReLU as one operation: ``relu(conv(x, w) + b + residual)``.

Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

from common.ops.conv_bias_relu.plain import conv_bias_relu_torch
from common.ops.implementation import Implementation, always

IMPLEMENTATIONS = {"torch": Implementation("torch", conv_bias_relu_torch, always)}
