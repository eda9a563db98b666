"""Residual addition and LayerNorm in front of a sub-layer: ``sum = residual + x + added``, ``normed = LayerNorm(sum)``.

LayerNorm: Ba, Kiros, Hinton, arXiv:1607.06450, with the biased variance and epsilon inside the square root. ``added``
is the bias of the matrix product that computes ``x``. The next residual connection reads the sum, the sub-layer reads
the normalised rows. Backward is one pass over both gradients; ``x`` and the residual get the same gradient. The
post-norm form of BERT, with dropout, is :mod:`common.ops.dropout_add_norm`. The kernels of both share
:mod:`common.ops.norm.rows`.
"""

from __future__ import annotations

from common.ops.add_layer_norm.reference import add_layer_norm_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

MOST_FEATURES = 8192
"""Largest number of features of the Triton kernels. A program keeps a whole row, and in backward two or three sums of
that size, in registers."""


ADD_LAYER_NORM = Operation(
    "add_layer_norm",
    add_layer_norm_reference,
    {
        "triton": triton_kernels("common.ops.add_layer_norm.triton:add_layer_norm", most={"features": MOST_FEATURES}),
    },
    kernel_names=(("layer norm", r"^add_layer_norm_"),),
    cases="common.ops.add_layer_norm.cases",
)
"""Signature: ``add_layer_norm(x_RC, residual_RC, weight_C, bias_C, eps, *, added_C=None)``. Size of a request:
``features``."""
