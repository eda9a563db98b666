"""What ends every sub-layer of a post-norm transformer: ``LayerNorm(residual + dropout(x + bias))``.

LayerNorm: Ba, Kiros, Hinton, arXiv:1607.06450, with the biased variance and epsilon inside the square root.

Between products in FP8 the result is written in FP8 beside 16 bits, which the residual connection needs, and the
gradient of ``x`` in FP8 alone, with delayed scales (:mod:`common.ops.fp8_cast`). Both leave their transposes to the
products that want them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.dropout_add_norm.plain import dropout_add_norm_torch
from common.ops.fp8_cast.plain import Fp8Tensor
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _dropout_add_norm_triton(*args: Any, **options: Any) -> Tensor | Fp8Tensor | tuple[Tensor | Fp8Tensor, Tensor]:
    from common.ops.dropout_add_norm.triton import dropout_add_norm  # triton is imported only where it is used

    return dropout_add_norm(*args, **options)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _dropout_add_norm_triton, triton_unsupported),
    "torch": Implementation("torch", dropout_add_norm_torch, always),
}
"""Signature: ``dropout_add_norm(x, bias, residual, weight, norm_bias, epsilon, dropout, twice=False, *, fp8=None,
handover=None)``."""

KERNEL_NAMES = (("dropout and layer norm", r"^dropout_add_norm_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
