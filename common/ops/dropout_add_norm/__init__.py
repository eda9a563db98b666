"""The end of every sub-layer of a post-norm transformer: ``LayerNorm(residual + dropout(x + bias))``.

LayerNorm: Ba, Kiros, Hinton, arXiv:1607.06450, with the biased variance and epsilon inside the square root.

Between FP8 matrix products the kernels write the result in FP8 and, for the residual connection, in 16 bits, and the
gradient of ``x`` only in FP8, with delayed scales (:mod:`common.ops.fp8_cast`). They do not write transposes.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from common.ops.dropout.reference import DropoutMask, dropout_reference
from common.ops.fp8_cast.reference import E4M3, Fp8Tensor, Handover, Scaling, computed_reference, widened
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


def dropout_add_norm_reference(
    x_TE: Tensor,
    bias_E: Tensor | None,
    residual_TE: Tensor | None,
    weight_E: Tensor,
    norm_bias_E: Tensor,
    epsilon: float,
    dropout: DropoutMask,
    twice: bool = False,
    *,
    fp8: Scaling | None = None,
    handover: Handover | None = None,
) -> Tensor | Fp8Tensor | tuple[Tensor | Fp8Tensor, Tensor]:
    """Return ``LayerNorm(residual + dropout(x + bias))``.

    Args:
        x_TE: input; contiguous.
        bias_E: bias of x, or None.
        residual_TE: matrix to add after dropout, or None.
        weight_E, norm_bias_E: scale and shift of LayerNorm.
        epsilon: number that is added to the variance.
        dropout: mask whose indices are those of the flat (T, E) tensor.
        twice: return the result twice, for two consumers, so that a fused implementation can add their gradients.
        fp8: scale of a result in e4m3, or None. FP8 values are rounded to the dtype of ``x_TE`` first.
        handover: receives the gradient of ``x_TE`` in e5m2 if it has a scale.

    Returns:
        (T, E), dtype of ``x_TE``, or FP8 without a transpose. With ``twice`` a pair, whose second tensor is never in
        FP8. Do not change results in place.
    """
    y_TE = widened(x_TE, handover)
    if bias_E is not None:
        y_TE = y_TE + widen(bias_E)
    y_TE = dropout_reference(y_TE, *dropout)
    if residual_TE is not None:
        y_TE = y_TE + widen(residual_TE)
    y_TE = F.layer_norm(y_TE, weight_E.shape, weight_E.to(y_TE), norm_bias_E.to(y_TE), epsilon).to(x_TE.dtype)
    first: Tensor | Fp8Tensor = y_TE
    if fp8 is not None:
        first = replace(computed_reference(widen(y_TE), fp8, E4M3, y_TE.dtype), source=y_TE)
    return (first, y_TE) if twice else first


DROPOUT_ADD_NORM = Operation(
    "dropout_add_norm",
    dropout_add_norm_reference,
    {
        "triton": triton_kernels("common.ops.dropout_add_norm.triton:dropout_add_norm"),
    },
    kernel_names=(("dropout and layer norm", r"^dropout_add_norm_"),),
    cases="common.ops.dropout_add_norm.cases",
)
"""Signature: ``dropout_add_norm(x, bias, residual, weight, norm_bias, epsilon, dropout, twice=False, *, fp8=None,
handover=None)``."""
