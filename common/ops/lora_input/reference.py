"""The reference of :mod:`common.ops.lora_input`. Shapes: T rows, E columns, r rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.dropout.reference import DropoutMask, keep_mask, scale_of_kept
from common.ops.triton_support import widen


class Region(NamedTuple):
    """Where a part lies in the whole tensor, whose elements the mask counts; by default it is the whole.

    Attributes:
        rows: number of each row, int64 (T,), on the device; None for 0 ... T - 1.
        columns_total: columns of the whole; None for those of the part.
        column_offset: of the first column of the part.
    """

    rows: Tensor | None = None
    columns_total: int | None = None
    column_offset: int = 0


class LoraInput(NamedTuple):
    """The functions of an implementation.

    See :func:`dropped_reference`, :func:`dropped_norm_reference` and :func:`add_input_gradient_reference`.
    """

    dropped: Callable[..., Tensor]
    dropped_norm: Callable[..., Tensor]
    add_input_gradient: Callable[..., Tensor]


WHOLE = Region()


@torch.no_grad()
def dropped_reference(x_TE: Tensor, mask: DropoutMask, region: Region = WHOLE) -> Tensor:
    """Reference implementation.

    Args:
        x_TE: contiguous.
        mask: of the adapter's dropout; without any (p = 0) the result is ``x_TE`` itself.
        region: where ``x_TE`` lies.

    Returns:
        (T, E), dtype of ``x_TE``: kept elements over the share that is kept, zeros elsewhere.
    """
    if mask.p == 0.0:
        return x_TE
    return _masked(widen(x_TE), mask, region).to(x_TE.dtype)


@torch.no_grad()
def dropped_norm_reference(
    residual_TE: Tensor, inverse_rms_T: Tensor, weight_E: Tensor, mask: DropoutMask, region: Region = WHOLE
) -> Tensor:
    """Dropout of a norm's result, from what the norm kept; see :mod:`common.ops.row_norm`.

    Args:
        residual_TE, inverse_rms_T: residual and moments of :class:`common.ops.row_norm.reference.Normed`.
        weight_E: of the norm.
        mask, region: see :func:`dropped_reference`.

    Returns:
        (T, E), dtype of the residual. The norm's result is rounded to it first, as it was when it was the input.
    """
    y_TE = (widen(residual_TE) * inverse_rms_T.unsqueeze(1) * widen(weight_E)).to(residual_TE.dtype)
    return dropped_reference(y_TE, mask, region)


@torch.no_grad()
def add_input_gradient_reference(
    dx_TE: Tensor, du_Tr: Tensor, a_rE: Tensor, mask: DropoutMask, region: Region = WHOLE
) -> Tensor:
    """Add the adapter's share to the gradient of its input, in place.

    Args:
        dx_TE: gradient of x by all else, contiguous; the masked and scaled ``du a`` is added to it.
        du_Tr: gradient of ``u = drop(x) a^T``, the adapter's factor s included; contiguous.
        a_rE: contiguous.
        mask, region: see :func:`dropped_reference`.

    Returns:
        ``dx_TE``.
    """
    gradient_TE = widen(du_Tr) @ widen(a_rE)
    if mask.p > 0.0:
        gradient_TE = _masked(gradient_TE, mask, region)
    return dx_TE.copy_(widen(dx_TE) + gradient_TE)


def _masked(wide_TE: Tensor, mask: DropoutMask, region: Region) -> Tensor:
    tokens, columns = wide_TE.shape
    rows_T = torch.arange(tokens, device=wide_TE.device) if region.rows is None else region.rows
    total = columns if region.columns_total is None else region.columns_total
    index_TE = rows_T.unsqueeze(1) * total + region.column_offset + torch.arange(columns, device=wide_TE.device)
    keep_TE = keep_mask(mask.seed, mask.site, index_TE, mask.p)
    return torch.where(keep_TE, wide_TE * scale_of_kept(mask.p), 0.0)
