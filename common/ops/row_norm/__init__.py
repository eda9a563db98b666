"""Residual addition and a norm of each row, also in FP8: RMSNorm and LayerNorm with weights centred on zero.

RMSNorm: ``x = residual + delta``, ``y = weight x / sqrt(mean(x^2) + epsilon)`` (Zhang, Sennrich, arXiv:1910.07467,
section 3). LayerNorm 1p, as Megatron-LM calls a layer norm whose weights start at zero and decay towards it:
``x = residual + delta + added``, ``y = (x - mean(x)) / sqrt(variance(x) + epsilon) (1 + weight) + bias`` (Ba, Kiros,
Hinton, arXiv:1607.06450). ``added`` is the bias of the product that made ``delta``.

The functions work without autograd: the caller keeps ``x`` and ``moments``, from which backward and ``recompute``
follow; y is kept nowhere. The gradients of the parameters are a function of its own, since frozen ones have none. FP8
results are rounded from the arithmetic's own precision, with a delayed scale (:mod:`common.ops.fp8_cast`). The pre-norm
of :mod:`common.ops.add_layer_norm` is the one with autograd and weights around one, for narrower rows.
"""

from __future__ import annotations

from common.ops.operation import Operation
from common.ops.row_norm.reference import REFERENCE
from common.ops.triton_support import triton_kernels

MOST_FEATURES = 16384
"""A program of the Triton kernels holds a whole row."""

FAST = {"triton": triton_kernels("common.ops.row_norm.triton", most={"features": MOST_FEATURES})}
KERNEL_NAMES = (("RMSNorm or layer norm", r"^row_norm_"),)

RMS_NORM = Operation("rms_norm", REFERENCE, FAST, kernel_names=KERNEL_NAMES, cases="common.ops.row_norm.cases:RMS_NORM")
"""Functions: :class:`common.ops.row_norm.reference.RowNorm`. A request says ``features``."""

LAYER_NORM_1P = Operation(
    "layer_norm_1p", REFERENCE, FAST, kernel_names=KERNEL_NAMES, cases="common.ops.row_norm.cases:LAYER_NORM_1P"
)
"""As :data:`RMS_NORM`."""
