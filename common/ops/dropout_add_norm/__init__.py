"""What ends every sub-layer of a post-norm transformer: ``LayerNorm(residual + dropout(x + bias))``.

LayerNorm: Ba, Kiros, Hinton, arXiv:1607.06450, with the biased variance and epsilon inside the square root.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.dropout_add_norm.plain import dropout_add_norm_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _dropout_add_norm_triton(*args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    from common.ops.dropout_add_norm.triton import dropout_add_norm  # triton is imported only where it is used

    return dropout_add_norm(*args, **options)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _dropout_add_norm_triton, triton_unsupported),
    "torch": Implementation("torch", dropout_add_norm_torch, always),
}
"""Signature: ``dropout_add_norm(x, bias, residual, weight, norm_bias, epsilon, dropout, twice=False)``."""

KERNEL_NAMES = (("dropout and layer norm", r"^dropout_add_norm_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
