"""GELU of a matrix product and its bias, in the tanh form that BERT was trained with.

``0.5 z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3)))`` with z = x + bias: Hendrycks, Gimpel, arXiv:1606.08415, section 2.

Between two products in FP8 the result and the gradient are written in FP8 at once, rounded from the arithmetic's own
precision with delayed scales (:mod:`common.ops.fp8_cast`).

There is one function with autograd, and a pair without, for a caller that writes the backward pass: it keeps ``saved``,
the product itself, or z in e4m3, of which backward then takes its values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.bias_gelu.plain import (
    Activated,
    BiasGelu,
    Gradients,
    backward_torch,
    bias_gelu_torch,
    forward_torch,
)
from common.ops.fp8_cast.plain import Fp8Tensor
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _bias_gelu_triton(*args: Any, **kwargs: Any) -> Tensor | Fp8Tensor:
    from common.ops.bias_gelu.triton import bias_gelu  # triton is imported only where it is used

    return bias_gelu(*args, **kwargs)


def _forward_triton(*args: Any, **kwargs: Any) -> Activated:
    from common.ops.bias_gelu import triton  # triton is imported only where it is used

    return triton.forward(*args, **kwargs)


def _backward_triton(*args: Any, **kwargs: Any) -> Gradients:
    from common.ops.bias_gelu import triton  # triton is imported only where it is used

    return triton.backward(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _bias_gelu_triton, triton_unsupported),
    "torch": Implementation("torch", bias_gelu_torch, always),
}
"""Signature: ``bias_gelu(x_TF, bias_F, *, fp8=None, handover=None)``."""

WITHOUT_AUTOGRAD = {
    "triton": Implementation("triton", BiasGelu(_forward_triton, _backward_triton), triton_unsupported),
    "torch": Implementation("torch", BiasGelu(forward_torch, backward_torch), always),
}
"""Functions: :class:`BiasGelu`."""

KERNEL_NAMES = (("GELU", r"^bias_gelu_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
