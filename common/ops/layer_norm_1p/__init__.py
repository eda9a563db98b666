"""Residual addition and LayerNorm with weights centred on zero: ``x = residual + delta + added``, ``y = (x - mean(x)) /
sqrt(variance(x) + epsilon) (1 + weight) + bias``, also in FP8.

LayerNorm: Ba, Kiros, Hinton, arXiv:1607.06450. Weights that start at zero and decay towards it are what Megatron-LM
calls a layer norm 1p. ``added`` is the bias of the product that made ``delta``. The functions work without autograd, as
those of :mod:`common.ops.rms_norm`: the caller keeps ``x`` and ``moments``, from which backward and :func:`recompute`
follow; y is kept nowhere. FP8 results are rounded from the arithmetic's own precision, with a delayed scale
(:mod:`common.ops.fp8_cast`). The pre-norm of :mod:`common.ops.add_layer_norm` is the one with autograd and weights
around one, for narrower rows.
"""

from __future__ import annotations

from common.ops.layer_norm_1p.reference import (
    LayerNorm1p,
    backward_reference,
    forward_reference,
    parameter_gradients_reference,
    recompute_reference,
)
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

MOST_FEATURES = 16384
"""A program of the Triton kernels holds a whole row."""


LAYER_NORM_1P = Operation(
    "layer_norm_1p",
    LayerNorm1p(forward_reference, backward_reference, recompute_reference, parameter_gradients_reference),
    {
        "triton": triton_kernels("common.ops.layer_norm_1p.triton", most={"features": MOST_FEATURES}),
    },
    kernel_names=(("layer norm", r"^layer_norm_1p_"),),
    cases="common.ops.layer_norm_1p.cases",
)
"""Functions: :class:`LayerNorm1p`. A request says ``features``."""
