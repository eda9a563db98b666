# mypy: allow-untyped-defs
"""Triton kernels of the cross-entropy of M rows of logits over V columns; those from ``vocabulary`` on are padding.

A program owns a row and loops over it in chunks. Forward is the online softmax (Milakov, Gimelshein 2018); backward
writes ``d_loss * (softmax - one-hot)`` chunk by chunk, so that the gradient may overwrite the logits. There is no fp32
copy of the logits. Memory bounds both passes: 3,840 rows of 30,528 columns in 16 bit are 234 MB forward and 469 MB
backward, 55 and 109 us at 4.3 TB/s on an H200.

A row is correct if the label is the first of the largest logits. This needs no argmax: no earlier logit is as large and
no later one is larger. The comparisons are written so that a NaN makes the row incorrect.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.cross_entropy import NO_LABEL
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

_NO_LABEL: tl.constexpr = tl.constexpr(NO_LABEL)


@triton.jit
def _load(row_ptr, column, V, vocabulary):
    """Return the logits of a chunk, -inf for padding. The mask uses V, a multiple of 64, to allow 16-byte loads."""
    logits = tl.load(row_ptr + column, mask=column < V, other=0.0).to(tl.float32)
    return tl.where(column < vocabulary, logits, float("-inf"))


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr,  # (M, V)
    labels_ptr,  # (M,) int32 or int64
    losses_ptr,  # (M,) fp32
    correct_ptr,  # (M,) bool
    lse_ptr,  # (M,) fp32, written for rows with a label
    V, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write losses, correctness and log-sum-exp. Grid (M,)."""
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row).to(tl.int32)
    if label == _NO_LABEL:
        tl.store(losses_ptr + row, 0.0)
        tl.store(correct_ptr + row, 0)
        return
    row_ptr = logits_ptr + row.to(tl.int64) * V
    of_label = tl.load(row_ptr + label, mask=label < vocabulary, other=float("-inf")).to(tl.float32)
    largest = of_label
    total = tl.zeros((BLOCK,), tl.float32)
    beaten = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logits = _load(row_ptr, column, V, vocabulary)
        larger = tl.maximum(largest, tl.max(logits, 0))
        total = total * tl.exp(largest - larger) + tl.exp(logits - larger)
        largest = larger
        loses = (logits < of_label) | ((logits == of_label) & (column >= label)) | (column >= vocabulary)
        beaten |= tl.where(loses, 0, 1)
    lse = largest + tl.log(tl.sum(total, 0))
    tl.store(losses_ptr + row, lse - of_label)
    tl.store(correct_ptr + row, tl.max(beaten, 0) == 0)
    tl.store(lse_ptr + row, lse)


@triton.jit
def cross_entropy_backward_kernel(
    d_losses_ptr,  # (M,) fp32
    logits_ptr,  # (M, V)
    labels_ptr,  # (M,) int32 or int64
    lse_ptr,  # (M,) fp32
    d_logits_ptr,  # (M, V), may be logits_ptr
    V, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the logits. Grid (M,)."""
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row).to(tl.int32)
    row_ptr = logits_ptr + row.to(tl.int64) * V
    target_ptr = d_logits_ptr + row.to(tl.int64) * V
    if label == _NO_LABEL:
        for first in range(0, V, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tl.store(target_ptr + column, tl.zeros((BLOCK,), d_logits_ptr.dtype.element_ty), mask=column < V)
        return
    d_loss = tl.load(d_losses_ptr + row)
    lse = tl.load(lse_ptr + row)
    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logits = _load(row_ptr, column, V, vocabulary)
        gradient = d_loss * (tl.exp(logits - lse) - tl.where(column == label, 1.0, 0.0))
        tl.store(target_ptr + column, gradient.to(d_logits_ptr.dtype.element_ty), mask=column < V)


TILES: dict[str, Tile] = {"forward": Tile(columns=4096, warps=8), "backward": Tile(columns=4096, warps=8)}
"""Tiles by pass."""


def _launch(tile: Tile, columns: int) -> dict[str, int]:
    return {"BLOCK": min(tile.columns, triton.next_power_of_2(columns)), "num_warps": tile.warps}


def forward(logits_MV: Tensor, labels_M: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (M,) fp32, correct (M,) bool, and log-sum-exp (M,) fp32, undefined without a label."""
    require_contiguous(logits=logits_MV, labels=labels_M)
    rows, columns = logits_MV.shape
    losses_M = logits_MV.new_empty(rows, dtype=torch.float32)
    correct_M = torch.empty_like(losses_M, dtype=torch.bool)
    lse_M = torch.empty_like(losses_M)
    cross_entropy_forward_kernel[(rows,)](
        logits_MV, labels_M, losses_M, correct_M, lse_M, columns, vocabulary, **_launch(TILES["forward"], columns)
    )
    return losses_M, correct_M, lse_M


def backward(
    d_losses_M: Tensor, logits_MV: Tensor, labels_M: Tensor, lse_M: Tensor, vocabulary: int, inplace: bool
) -> Tensor:
    """Return the gradient of the logits, which overwrites them if ``inplace``."""
    require_contiguous(d_losses=d_losses_M, logits=logits_MV, labels=labels_M, lse=lse_M)
    rows, columns = logits_MV.shape
    d_logits_MV = logits_MV if inplace else torch.empty_like(logits_MV)
    cross_entropy_backward_kernel[(rows,)](
        d_losses_M, logits_MV, labels_M, lse_M, d_logits_MV, columns, vocabulary, **_launch(TILES["backward"], columns)
    )
    return d_logits_MV


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor, vocabulary: int, inplace: bool) -> tuple[Tensor, Tensor]:
        logits_MV = logits_MV.contiguous()
        losses_M, correct_M, lse_M = forward(logits_MV, labels_M, vocabulary)
        ctx.save_for_backward(logits_MV, labels_M, lse_M)
        ctx.mark_non_differentiable(correct_M)
        ctx.vocabulary, ctx.inplace = vocabulary, inplace
        return losses_M, correct_M

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits_MV, labels_M, lse_M = ctx.saved_tensors
        d_losses_M = gradients[0].contiguous()
        return backward(d_losses_M, logits_MV, labels_M, lse_M, ctx.vocabulary, ctx.inplace), None, None, None


def masked_cross_entropy(
    logits_MV: Tensor, labels_M: Tensor, vocabulary: int, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the loss (M,), fp32, of each row, and whether the prediction is correct, (M,) bool.

    See :func:`common.ops.cross_entropy.masked_cross_entropy_reference`. With ``inplace`` backward overwrites the logits
    with their gradient. So it can run only once, and afterwards neither the caller nor the backward pass of the
    operation that computed the logits may read them.
    """
    result: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits_MV, labels_M.contiguous(), vocabulary, inplace)
    return result


@torch.no_grad()
def log_sum_exp(logits_MV: Tensor, labels_M: Tensor, vocabulary: int) -> Tensor:
    """Return the log-sum-exp (M,) fp32 of each row's words; see :func:`common.ops.cross_entropy.log_sum_exp_reference`.

    Rows without a label stay uninitialised.
    """
    any_label_M = torch.where(labels_M == NO_LABEL, NO_LABEL, 0)  # the kernel also reads the logit of the label
    return forward(logits_MV, any_label_M, vocabulary)[2]


@torch.no_grad()
def gradient(d_losses_M: Tensor, logits_MV: Tensor, labels_M: Tensor, lse_M: Tensor, vocabulary: int) -> Tensor:
    """Overwrite the logits with their gradient, (M, V), and return them.

    See :func:`common.ops.cross_entropy.gradient_reference`.
    """
    return backward(d_losses_M, logits_MV, labels_M, lse_M, vocabulary, True)
