"""The plain version of :mod:`common.ops.dropout_add_norm`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.dropout.plain import DropoutMask, dropout_torch
from common.ops.triton_support import widen


def dropout_add_norm_torch(
    x_TE: Tensor,
    bias_E: Tensor | None,
    residual_TE: Tensor | None,
    weight_E: Tensor,
    norm_bias_E: Tensor,
    epsilon: float,
    dropout: DropoutMask,
    twice: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Plain version.

    Args:
        x_TE: input; contiguous.
        bias_E: added to it, or None for nothing.
        residual_TE: added after the dropout, or None for nothing.
        weight_E, norm_bias_E: scale and shift after normalising.
        epsilon: added to the variance.
        dropout: its elements count over (T, E).
        twice: hand the result out twice, for two readers: a fused version then adds their gradients itself.

    Returns:
        (T, E), dtype of ``x_TE``; with ``twice`` a pair of it, which must not be written to.
    """
    y_TE = widen(x_TE)
    if bias_E is not None:
        y_TE = y_TE + widen(bias_E)
    y_TE = dropout_torch(y_TE, *dropout)
    if residual_TE is not None:
        y_TE = y_TE + widen(residual_TE)
    y_TE = F.layer_norm(y_TE, weight_E.shape, weight_E.to(y_TE), norm_bias_E.to(y_TE), epsilon).to(x_TE.dtype)
    return (y_TE, y_TE) if twice else y_TE
