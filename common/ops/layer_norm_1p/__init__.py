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

from typing import Any

from torch import Tensor

from common.ops.fp8_cast.plain import Fp8Tensor
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.layer_norm_1p.plain import (
    LayerNorm1p,
    Normed,
    ParameterGradients,
    backward_torch,
    forward_torch,
    parameter_gradients_torch,
    recompute_torch,
)
from common.ops.triton_support import triton_unsupported

MOST_FEATURES = 16384
"""A program of the Triton kernels holds a whole row."""


def _forward_triton(*args: Any, **kwargs: Any) -> Normed:
    from common.ops.layer_norm_1p import triton  # triton is imported only where it is used

    return triton.forward(*args, **kwargs)


def _backward_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Fp8Tensor | None]:
    from common.ops.layer_norm_1p import triton  # triton is imported only where it is used

    return triton.backward(*args, **kwargs)


def _recompute_triton(*args: Any) -> Tensor:
    from common.ops.layer_norm_1p import triton  # triton is imported only where it is used

    return triton.recompute(*args)


def _parameter_gradients_triton(*args: Any) -> ParameterGradients:
    from common.ops.layer_norm_1p import triton  # triton is imported only where it is used

    return triton.parameter_gradients(*args)


def _unsupported(request: OperationRequest) -> str | None:
    if request.sizes["features"] > MOST_FEATURES:
        return f"at most {MOST_FEATURES} features, not {request.sizes['features']}"
    return triton_unsupported(request)


IMPLEMENTATIONS = {
    "triton": Implementation(
        "triton",
        LayerNorm1p(_forward_triton, _backward_triton, _recompute_triton, _parameter_gradients_triton),
        _unsupported,
    ),
    "torch": Implementation(
        "torch", LayerNorm1p(forward_torch, backward_torch, recompute_torch, parameter_gradients_torch), always
    ),
}
"""Functions: :class:`LayerNorm1p`. A request says ``features``."""

KERNEL_NAMES = (("layer norm", r"^layer_norm_1p_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
