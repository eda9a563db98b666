"""Residual addition and RMSNorm: ``x = residual + delta``, ``y = weight x / sqrt(mean(x^2) + epsilon)``, also in FP8.

Zhang, Sennrich, arXiv:1910.07467, section 3. The pair of functions works without autograd: the caller keeps ``x`` and
``inverse_rms``, from which backward and :func:`recompute` follow; y is kept nowhere. The gradient of the weight is a
function of its own, since a frozen one has none. FP8 results are rounded from the arithmetic's own precision, with a
delayed scale (:mod:`common.ops.fp8_cast`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.fp8_cast.plain import Fp8Tensor
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.rms_norm.plain import (
    Normed,
    RmsNorm,
    backward_torch,
    forward_torch,
    recompute_torch,
    weight_gradient_torch,
)
from common.ops.triton_support import triton_unsupported

MOST_FEATURES = 16384
"""A program of the Triton kernels holds a whole row."""


def _forward_triton(*args: Any, **kwargs: Any) -> Normed:
    from common.ops.rms_norm import triton  # triton is imported only where it is used

    return triton.forward(*args, **kwargs)


def _backward_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Fp8Tensor | None]:
    from common.ops.rms_norm import triton  # triton is imported only where it is used

    return triton.backward(*args, **kwargs)


def _recompute_triton(*args: Any) -> Tensor:
    from common.ops.rms_norm import triton  # triton is imported only where it is used

    return triton.recompute(*args)


def _weight_gradient_triton(*args: Any) -> Tensor:
    from common.ops.rms_norm import triton  # triton is imported only where it is used

    return triton.weight_gradient(*args)


def _unsupported(request: OperationRequest) -> str | None:
    if request.sizes["features"] > MOST_FEATURES:
        return f"at most {MOST_FEATURES} features, not {request.sizes['features']}"
    return triton_unsupported(request)


IMPLEMENTATIONS = {
    "triton": Implementation(
        "triton",
        RmsNorm(_forward_triton, _backward_triton, _recompute_triton, _weight_gradient_triton),
        _unsupported,
    ),
    "torch": Implementation(
        "torch", RmsNorm(forward_torch, backward_torch, recompute_torch, weight_gradient_torch), always
    ),
}
"""Functions: :class:`RmsNorm`. A request says ``features``."""

KERNEL_NAMES = (("RMSNorm", r"^rms_norm_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
