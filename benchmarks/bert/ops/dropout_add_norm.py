"""What ends every sub-layer of a post-norm transformer: ``LayerNorm(residual + dropout(x + bias))``.

LayerNorm: Ba, Kiros, Hinton, arXiv:1607.06450, with the biased variance and epsilon inside the square root.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.bert.ops.dropout import dropout_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported, widen


def dropout_add_norm_torch(
    x_TE: Tensor,
    bias_E: Tensor | None,
    residual_TE: Tensor | None,
    weight_E: Tensor,
    norm_bias_E: Tensor,
    p: float,
    epsilon: float,
    seed: Tensor,
    site: int,
    twice: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Plain version.

    Args:
        x_TE: input; contiguous.
        bias_E: added to it, or None for nothing.
        residual_TE: added after the dropout, or None for nothing.
        weight_E, norm_bias_E: scale and shift after normalising.
        p: dropout probability; with 0 the seed is not read.
        epsilon: added to the variance.
        seed, site: see :func:`benchmarks.bert.ops.dropout.keep_mask`; elements count over (T, E).
        twice: hand the result out twice, for two readers: a fused version then adds their gradients itself.

    Returns:
        (T, E), dtype of ``x_TE``; with ``twice`` a pair of it, which must not be written to.
    """
    y_TE = widen(x_TE)
    if bias_E is not None:
        y_TE = y_TE + widen(bias_E)
    y_TE = dropout_torch(y_TE, p, seed, site)
    if residual_TE is not None:
        y_TE = y_TE + widen(residual_TE)
    y_TE = F.layer_norm(y_TE, weight_E.shape, weight_E.to(y_TE), norm_bias_E.to(y_TE), epsilon).to(x_TE.dtype)
    return (y_TE, y_TE) if twice else y_TE


def _dropout_add_norm_triton(*args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    from benchmarks.bert.ops.dropout_add_norm_triton import dropout_add_norm  # triton is imported only where it is used

    return dropout_add_norm(*args, **options)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _dropout_add_norm_triton, triton_unsupported),
    "torch": Implementation("torch", dropout_add_norm_torch, always),
}
"""Signature: ``dropout_add_norm(x, bias, residual, weight, norm_bias, p, epsilon, seed, site, twice=False)``; channels
are E."""
