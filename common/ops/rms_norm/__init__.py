"""Residual addition and RMSNorm: ``x = residual + delta``, ``y = weight x / sqrt(mean(x^2) + epsilon)``, also in FP8.

Zhang, Sennrich, arXiv:1910.07467, section 3. The pair of functions works without autograd: the caller keeps ``x`` and
``inverse_rms``, from which backward and :func:`recompute` follow; y is kept nowhere. The gradient of the weight is a
function of its own, since a frozen one has none. FP8 results are rounded from the arithmetic's own precision, with a
delayed scale (:mod:`common.ops.fp8_cast`).
"""

from __future__ import annotations

from common.ops.operation import Operation
from common.ops.rms_norm.reference import (
    RmsNorm,
    backward_reference,
    forward_reference,
    recompute_reference,
    weight_gradient_reference,
)
from common.ops.triton_support import triton_kernels

MOST_FEATURES = 16384
"""A program of the Triton kernels holds a whole row."""


RMS_NORM = Operation(
    "rms_norm",
    RmsNorm(forward_reference, backward_reference, recompute_reference, weight_gradient_reference),
    {
        "triton": triton_kernels("common.ops.rms_norm.triton", most={"features": MOST_FEATURES}),
    },
    kernel_names=(("RMSNorm", r"^rms_norm_"),),
    cases="common.ops.rms_norm.cases",
)
"""Functions: :class:`RmsNorm`. A request says ``features``."""
