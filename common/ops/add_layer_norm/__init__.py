"""Residual addition and LayerNorm in front of a sub-layer: ``sum = residual + x + added``, ``normed = LayerNorm(sum)``.

LayerNorm: Ba, Kiros, Hinton, arXiv:1607.06450, with the biased variance and epsilon inside the square root. ``added``
is the bias of the product that made ``x``. Both results are read: the sum by the next residual connection, the
normalised rows by the sub-layer. Backward is one pass over both gradients, whose result is that of ``x`` and of the
residual alike. The post-norm form of BERT, with its dropout, is :mod:`common.ops.dropout_add_norm`;
:mod:`common.ops.norm.rows` has what their kernels share.
"""

from __future__ import annotations

from torch import Tensor

from common.ops.add_layer_norm.plain import add_layer_norm_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported

MOST_FEATURES = 8192
"""A program of the Triton kernels holds a whole row, and backward adds up two or three of them."""


def _add_layer_norm_triton(
    x_RC: Tensor,
    residual_RC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    eps: float,
    *,
    added_C: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from common.ops.add_layer_norm.triton import add_layer_norm  # triton is imported only where it is used

    return add_layer_norm(x_RC, residual_RC, weight_C, bias_C, eps, added_C=added_C)


def _unsupported(request: OperationRequest) -> str | None:
    if request.sizes["features"] > MOST_FEATURES:
        return f"at most {MOST_FEATURES} features, not {request.sizes['features']}"
    return triton_unsupported(request)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _add_layer_norm_triton, _unsupported),
    "torch": Implementation("torch", add_layer_norm_torch, always),
}
"""Signature: ``add_layer_norm(x_RC, residual_RC, weight_C, bias_C, eps, *, added_C=None)``. A request says
``features``."""

KERNEL_NAMES = (("layer norm", r"^add_layer_norm_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
