"""Convolution with bias, a residual and ReLU in its epilogue, and a backward pass of its own.

``relu(conv(x, weight) + bias + residual)``. Autograd would keep the result of every step; here only x, the weight and
the final result are kept, whose sign is the mask of the gradient. Where nothing needs a gradient nothing is kept. A
frozen batch norm is a scale in the weight and a bias that needs no gradient.
Shapes: N pictures, C channels (out, for the bias), H height, W width.
"""

from __future__ import annotations

from common.ops.conv_bias_relu.plain import conv_bias_relu_torch
from common.ops.implementation import Implementation, always

IMPLEMENTATIONS = {
    "torch": Implementation("torch", conv_bias_relu_torch, always),
}
"""Signature: ``conv_bias_relu(x_NCHW, weight, bias_C, stride, padding, groups, relu, residual_NCHW=None)``."""
