"""GELU of a matrix product and its bias, in the tanh form that BERT was trained with.

``0.5 z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3)))`` with z = x + bias: Hendrycks, Gimpel, arXiv:1606.08415, section 2.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported, widen


def bias_gelu_torch(x_TF: Tensor, bias_F: Tensor) -> Tensor:
    """Plain version.

    Args:
        x_TF: the product, without its bias.
        bias_F: the bias.

    Returns:
        (T, F), dtype of ``x_TF``.
    """
    return F.gelu(widen(x_TF) + widen(bias_F), approximate="tanh").to(x_TF.dtype)


def _bias_gelu_triton(*args: Any) -> Tensor:
    from benchmarks.bert.ops.bias_gelu_triton import bias_gelu  # triton is imported only where it is used

    return bias_gelu(*args)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _bias_gelu_triton, triton_unsupported),
    "torch": Implementation("torch", bias_gelu_torch, always),
}
"""Signature: ``bias_gelu(x_TF, bias_F)``; a request's channels are F."""
