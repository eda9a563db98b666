"""What an implementation of :mod:`benchmarks.rnnt.ops.transducer_loss` is made of, and the autograd around it.

Legend: R rows of a :class:`~benchmarks.rnnt.packed_rows.PackedRows`, or some consecutive ones of them beginning with
``first``, V classes, H width of the joint network, B utterances, U tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from benchmarks.rnnt.ops.joint.reference import JointPasses
from benchmarks.rnnt.packed_rows import PackedRows
from common.ops.dropout.reference import DropoutMask

NO_LABEL = -1
"""Label of rows behind an utterance's last token, which have no arc to another."""
NO_ROW = -2
"""Label of rows that do not exist."""


class Statistics(NamedTuple):
    """What is known of the logits of each row; fp32, fp64 of fp64.

    Attributes:
        lse_R: logarithm of the softmax's sum.
        blank_R, label_R: logarithms of the probabilities of blank and of the row's label.
    """

    lse_R: Tensor
    blank_R: Tensor
    label_R: Tensor


class Recursion(NamedTuple):
    """Logarithms of probabilities; fp32, fp64 of fp64.

    Attributes:
        alpha_R: of all ways from the first row of an utterance to this one.
        beta_R: of all ways from this one to the end.
        total_B: of all ways; minus infinity for an utterance without frames.
    """

    alpha_R: Tensor
    beta_R: Tensor
    total_B: Tensor


class Transitions(NamedTuple):
    """Gradient of the loss with respect to the logarithms of probabilities, with the sign changed: not negative.

    Attributes:
        blank_R, label_R: of both arcs of each row. The row's own occupancy is their sum.
    """

    blank_R: Tensor
    label_R: Tensor

    def part(self, rows: slice) -> Transitions:
        """Of some rows."""
        return Transitions(*(value[rows] for value in self))


class Chosen(NamedTuple):
    """Rows that the gradients are made of: all others would add nothing.

    Attributes:
        live_R: whether a row is one of them, bool.
        rank_R: how many of them there are up to each row, itself included, int32.
        row_R: their numbers, ascending, int32; as many as there are.
    """

    live_R: Tensor
    rank_R: Tensor
    row_R: Tensor


class LossPasses(NamedTuple):
    """An implementation, without autograd.

    Attributes:
        labels: (tokens_BU, rows) to the label of every row, int32.
        product: (h_RH, weight_VH, bias_V, label_R, first, rows) to logits_RV and their :class:`Statistics`. Rows of h
            that do not exist hold anything, and may be overwritten.
        recursion: (statistics, rows) to :class:`Recursion`.
        transitions: (statistics, recursion, d_loss_B, rows) to :class:`Transitions`.
        choose: (transitions, label_R, d_loss_B, dtype) to the rows that gradients in ``dtype`` are made of.
        gradient: (logits_RV, d_logits_RV, lse_R, transitions, label_R, first, chosen) writes the gradient of the
            logits to ``d_logits_RV``, which may be ``logits_RV``; returns its sums over the rows, (V,) in the dtype of
            sums. Rows that are not chosen stay as they are.
        weight_gradient: (d_logits_RV, h_RH, first, chosen) to (V, H) in the dtype of sums.
        input_gradient_: (d_logits_RV, weight_VH, h_RH, first, chosen): h becomes its gradient where it is not zero, and
            stays zero elsewhere; rows that are not chosen stay as they are.
    """

    labels: Callable[[Tensor, PackedRows], Tensor]
    product: Callable[[Tensor, Tensor, Tensor, Tensor, int, PackedRows], tuple[Tensor, Statistics]]
    recursion: Callable[[Statistics, PackedRows], Recursion]
    transitions: Callable[[Statistics, Recursion, Tensor, PackedRows], Transitions]
    choose: Callable[[Transitions, Tensor, Tensor, torch.dtype], Chosen]
    gradient: Callable[[Tensor, Tensor, Tensor, Transitions, Tensor, int, Chosen], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, int, Chosen], Tensor]
    input_gradient_: Callable[[Tensor, Tensor, Tensor, int, Chosen], None]


def check_tokens(tokens_BU: Tensor, rows: PackedRows) -> None:
    """Refuse tokens of another shape than the rows'.

    Raises:
        ValueError: they do not fit.
    """
    if tuple(tokens_BU.shape) != (rows.utterances, rows.most_tokens):
        raise ValueError(f"tokens must be ({rows.utterances}, {rows.most_tokens}), not {tuple(tokens_BU.shape)}")


class JointLoss(Function):
    """Loss of both networks' results, through the joint network.

    Of activations its hidden layer and the logits are kept, and backward writes gradients into the place of both. With
    ``parts`` above 1 logits exist of that share of the rows at a time, and are computed again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        joint: JointPasses,
        loss: LossPasses,
        f_SBH: Tensor,
        g_NBH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor,
        tokens_BU: Tensor,
        rows: PackedRows,
        dropout: DropoutMask,
        parts: int,
    ) -> Tensor:
        h_RH = joint.forward(f_SBH, g_NBH, rows, dropout)
        label_R = loss.labels(tokens_BU, rows)
        shares = _shares(rows.capacity, parts)
        logits_RV, found = None, []
        for share in shares:
            logits_RV, statistics = loss.product(h_RH[share], weight_VH, bias_V, label_R[share], share.start, rows)
            found.append(statistics)
            if len(shares) > 1:
                logits_RV = None
        statistics = (
            found[0] if len(found) == 1 else Statistics(*(torch.cat(part) for part in zip(*found, strict=True)))
        )
        recursion = loss.recursion(statistics, rows)
        ctx.save_for_backward(weight_VH, bias_V, dropout.seed, *rows[:3])
        ctx.held = (h_RH, label_R, logits_RV, statistics, recursion)
        ctx.of_host = (joint, loss, rows[3:], dropout.p, dropout.site, shares, len(f_SBH), len(g_NBH))
        return -recursion.total_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.held is None:
            raise RuntimeError("a second backward pass: the first one has left gradients in the place of activations")
        weight_VH, bias_V, seed, *lengths = ctx.saved_tensors
        h_RH, label_R, logits_RV, statistics, recursion = ctx.held
        joint, loss, sizes, p, site, shares, frames, columns = ctx.of_host
        ctx.held = None
        rows = PackedRows(*lengths, *sizes)
        transitions = loss.transitions(statistics, recursion, gradients[0].contiguous(), rows)
        chosen = loss.choose(transitions, label_R, gradients[0], h_RH.dtype)
        d_weight_VH = d_bias_V = None
        for share in shares:
            h_CH, label_C = h_RH[share], label_R[share]
            d_CV = logits_RV
            if d_CV is None:
                d_CV, _ = loss.product(h_CH, weight_VH, bias_V, label_C, share.start, rows)
            d_bias = loss.gradient(
                d_CV, d_CV, statistics.lse_R[share], transitions.part(share), label_C, share.start, chosen
            )
            d_weight = loss.weight_gradient(d_CV, h_CH, share.start, chosen)
            loss.input_gradient_(d_CV, weight_VH, h_CH, share.start, chosen)
            d_bias_V = d_bias if d_bias_V is None else d_bias_V.add_(d_bias)
            d_weight_VH = d_weight if d_weight_VH is None else d_weight_VH.add_(d_weight)
            del d_CV
        df_SBH, dg_NBH = joint.backward(h_RH, chosen.live_R, frames, columns, rows, DropoutMask(p, seed, site))
        assert d_weight_VH is not None
        assert d_bias_V is not None
        return (
            None, None, df_SBH, dg_NBH, d_weight_VH.to(weight_VH.dtype), d_bias_V.to(bias_V.dtype),
            None, None, None, None,
        )  # fmt: skip


def _shares(capacity: int, parts: int) -> list[slice]:
    """Rows in so many parts of the same size, but for the last one."""
    if parts < 1:
        raise ValueError(f"rows in {parts} parts: at least 1")
    size = max(-(-capacity // parts), 1)
    return [slice(first, min(first + size, capacity)) for first in range(0, max(capacity, 1), size)]


def joint_loss(
    joint: JointPasses,
    loss: LossPasses,
    f_SBH: Tensor,
    g_NBH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor,
    tokens_BU: Tensor,
    rows: PackedRows,
    dropout: DropoutMask,
    parts: int = 1,
) -> Tensor:
    """Loss of each utterance by the results of both networks.

    Args:
        joint, loss: implementations.
        f_SBH, g_NBH: see :func:`benchmarks.rnnt.ops.joint.reference.forward_reference`.
        weight_VH, bias_V: of the joint network's last layer, whose last class is blank.
        tokens_BU: integers, 0 ... V - 2; what lies beyond an utterance's length is not read.
        rows: which rows there are.
        dropout: of the joint network's hidden layer.
        parts: logits exist of one of so many parts of the rows at a time.

    Returns:
        Negative logarithm of the probability of the tokens, (B,) fp32, fp64 of fp64; infinite, with no gradient, for
        an utterance without frames. There is one backward pass only, which is not differentiable.
    """
    check_tokens(tokens_BU, rows)
    loss_B: Tensor = JointLoss.apply(joint, loss, f_SBH, g_NBH, weight_VH, bias_V, tokens_BU, rows, dropout, parts)
    return loss_B
