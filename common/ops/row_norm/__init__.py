"""Residual addition and a norm of each row, optionally in FP8: RMSNorm, and LayerNorm with weights centred on zero.

RMSNorm: ``x = residual + delta``, ``y = weight x / sqrt(mean(x^2) + epsilon)`` (Zhang, Sennrich, arXiv:1910.07467,
section 3). LayerNorm 1p, Megatron-LM's name for a layer norm whose weights start at zero and decay towards it: ``x =
residual + delta + added``, ``y = (x - mean(x)) / sqrt(variance(x) + epsilon) (1 + weight) + bias`` (Ba, Kiros, Hinton,
arXiv:1607.06450). ``added`` is the bias of the product that computed ``delta``.

The functions work without autograd. The caller keeps ``x`` and ``moments``, from which backward and ``recompute``
compute their results; y is not kept. A separate function computes the gradients of the parameters, because frozen
parameters have none. FP8 results are rounded directly from fp32, with a delayed scale (:mod:`common.ops.fp8_cast`).
:mod:`common.ops.add_layer_norm` is a pre-norm with autograd and weights around one, for narrower rows.
"""

from __future__ import annotations

from common.ops.operation import Operation
from common.ops.row_norm.reference import REFERENCE
from common.ops.triton_support import triton_kernels

MOST_FEATURES = 16384
"""Largest number of features, because a program of the Triton kernels holds a whole row."""

FAST = {"triton": triton_kernels("common.ops.row_norm.triton", most={"features": MOST_FEATURES})}
KERNEL_NAMES = (("RMSNorm or layer norm", r"^row_norm_"),)

RMS_NORM = Operation("rms_norm", REFERENCE, FAST, kernel_names=KERNEL_NAMES, cases="common.ops.row_norm.cases:RMS_NORM")
"""Functions: :class:`common.ops.row_norm.reference.RowNorm`. Size of a request: ``features``."""

LAYER_NORM_1P = Operation(
    "layer_norm_1p", REFERENCE, FAST, kernel_names=KERNEL_NAMES, cases="common.ops.row_norm.cases:LAYER_NORM_1P"
)
"""Functions and sizes are those of :data:`RMS_NORM`."""
