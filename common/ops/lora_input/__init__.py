"""Dropout in front of a low-rank adapter (LoRA), and the backward pass through this dropout.

An adapter adds ``s B A drop(x)`` to ``W x`` (Hu et al., arXiv:2106.09685, section 4.1); the dropout is only in its
branch. The mask element of row t and column c has index ``rows[t] * columns_total + column_offset + c``; see
:mod:`common.ops.dropout`. Rows and columns are counted in the whole tensor, so the mask does not depend on how ranks
shard it. Nothing is stored: backward computes ``drop(x)`` again, from the input of the norm if x is the result of a
norm. The functions work without autograd.

Shapes: T rows, E columns, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.dropout.reference import DropoutMask, keep_mask, scale_of_kept
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


class Region(NamedTuple):
    """Position of a part within the whole tensor, which determines the dropout mask. By default the part is the whole.

    Attributes:
        rows: index of each row in the whole tensor, int64 (T,), on the device; None for 0 ... T - 1.
        columns_total: columns of the whole tensor; None if the part has all of them.
        column_offset: index of the part's first column in the whole tensor.
    """

    rows: Tensor | None = None
    columns_total: int | None = None
    column_offset: int = 0


class LoraInput(NamedTuple):
    """Functions of an implementation.

    See :func:`dropped_reference`, :func:`dropped_norm_reference` and :func:`add_input_gradient_reference`.
    """

    dropped: Callable[..., Tensor]
    dropped_norm: Callable[..., Tensor]
    add_input_gradient: Callable[..., Tensor]


WHOLE = Region()


@torch.no_grad()
def dropped_reference(x_TE: Tensor, mask: DropoutMask, region: Region = WHOLE) -> Tensor:
    """Return dropout of x, (T, E), in the dtype of ``x_TE``: kept elements divided by the keep probability, else 0.

    Args:
        x_TE: contiguous.
        mask: dropout of the adapter; for p = 0 the result is ``x_TE`` itself.
        region: position of ``x_TE`` in the whole tensor.
    """
    if mask.p == 0.0:
        return x_TE
    return _masked(widen(x_TE), mask, region).to(x_TE.dtype)


@torch.no_grad()
def dropped_norm_reference(
    residual_TE: Tensor, inverse_rms_T: Tensor, weight_E: Tensor, mask: DropoutMask, region: Region = WHOLE
) -> Tensor:
    """Return dropout of a norm's result, (T, E), computed from the tensors that :mod:`common.ops.row_norm` kept.

    Args:
        residual_TE, inverse_rms_T: residual and moments of :class:`common.ops.row_norm.Normed`.

    Returns:
        (T, E), dtype of the residual. The norm's result is first rounded to this dtype, as in the forward pass.
    """
    y_TE = (widen(residual_TE) * inverse_rms_T.unsqueeze(1) * widen(weight_E)).to(residual_TE.dtype)
    return dropped_reference(y_TE, mask, region)


@torch.no_grad()
def add_input_gradient_reference(
    dx_TE: Tensor, du_Tr: Tensor, a_rE: Tensor, mask: DropoutMask, region: Region = WHOLE
) -> Tensor:
    """Add the adapter's part of the input gradient to ``dx_TE`` in place, and return ``dx_TE``.

    Args:
        dx_TE: gradient of x without the adapter, contiguous. The masked and scaled ``du a`` is added to it.
        du_Tr: gradient of ``u = drop(x) a^T``, including the factor s of the adapter; contiguous.
        a_rE: contiguous.
    """
    gradient_TE = widen(du_Tr) @ widen(a_rE)
    if mask.p > 0.0:
        gradient_TE = _masked(gradient_TE, mask, region)
    return dx_TE.copy_(widen(dx_TE) + gradient_TE)


def _masked(widened_TE: Tensor, mask: DropoutMask, region: Region) -> Tensor:
    tokens, columns = widened_TE.shape
    rows_T = torch.arange(tokens, device=widened_TE.device) if region.rows is None else region.rows
    total = columns if region.columns_total is None else region.columns_total
    index_TE = rows_T.unsqueeze(1) * total + region.column_offset + torch.arange(columns, device=widened_TE.device)
    keep_TE = keep_mask(mask.seed, mask.site, index_TE, mask.p)
    return torch.where(keep_TE, widened_TE * scale_of_kept(mask.p), 0.0)


LORA_INPUT = Operation(
    "lora_input",
    LoraInput(dropped_reference, dropped_norm_reference, add_input_gradient_reference),
    {
        "triton": triton_kernels("common.ops.lora_input.triton"),
    },
    kernel_names=(("LoRA dropout", r"^lora_input_"),),
    cases="common.ops.lora_input.cases",
)
"""Functions: :class:`LoraInput`."""
