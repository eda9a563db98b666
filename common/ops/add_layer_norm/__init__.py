"""Residual addition and LayerNorm in front of a sub-layer: ``sum = residual + x + added``, ``normed = LayerNorm(sum)``.

LayerNorm: Ba, Kiros, Hinton, arXiv:1607.06450, with the biased variance and epsilon inside the square root. ``added``
is the bias of the product that made ``x``. Both results are read: the sum by the next residual connection, the
normalised rows by the sub-layer. Backward is one pass over both gradients, whose result is that of ``x`` and of the
residual alike. The post-norm form of BERT, with its dropout, is :mod:`common.ops.dropout_add_norm`;
:mod:`common.ops.norm.rows` has what their kernels share.
"""

from __future__ import annotations

from common.ops.add_layer_norm.reference import add_layer_norm_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

MOST_FEATURES = 8192
"""A program of the Triton kernels holds a whole row, and backward adds up two or three of them."""


ADD_LAYER_NORM = Operation(
    "add_layer_norm",
    add_layer_norm_reference,
    {
        "triton": triton_kernels("common.ops.add_layer_norm.triton:add_layer_norm", most={"features": MOST_FEATURES}),
    },
    kernel_names=(("layer norm", r"^add_layer_norm_"),),
    cases="common.ops.add_layer_norm.cases",
)
"""Signature: ``add_layer_norm(x_RC, residual_RC, weight_C, bias_C, eps, *, added_C=None)``. A request says
``features``."""
