"""Interface of implementations of :mod:`benchmarks.rnnt.ops.transducer_loss`, and the autograd function around them.

Shapes: R rows of a :class:`~benchmarks.rnnt.packed_rows.PackedRows`, or a consecutive part of them from row
``first``, V classes, H width of the joint network, B utterances, U tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from benchmarks.rnnt.ops.joint import JointPasses
from benchmarks.rnnt.packed_rows import PackedRows
from common.ops.dropout.reference import DropoutMask

NO_LABEL = -1
"""Label of rows after an utterance's last token, which cannot emit another."""
NO_ROW = -2
"""Label of unused rows."""


class Statistics(NamedTuple):
    """Statistics of the logits of each row; fp32 (fp64 for fp64).

    Attributes:
        lse_R: logarithm of the softmax's denominator.
        blank_R, label_R: logarithms of the probabilities of blank and of the row's label.
    """

    lse_R: Tensor
    blank_R: Tensor
    label_R: Tensor


class Recursion(NamedTuple):
    """Logarithms of the summed probabilities of paths; fp32 (fp64 for fp64).

    Attributes:
        alpha_R: all paths from the first row of an utterance to this row.
        beta_R: all paths from this row to the end.
        total_B: all paths of an utterance; minus infinity for an utterance without frames.
    """

    alpha_R: Tensor
    beta_R: Tensor
    total_B: Tensor


class Transitions(NamedTuple):
    """Negative gradient of the loss by the logarithms of the arcs' probabilities; not negative.

    Attributes:
        blank_R, label_R: values for the arcs of blank and label of each row. Their sum is the occupancy of the row.
    """

    blank_R: Tensor
    label_R: Tensor

    def part(self, rows: slice) -> Transitions:
        """Return the transitions of some rows."""
        return Transitions(*(value[rows] for value in self))


class Chosen(NamedTuple):
    """Rows that contribute to the gradients; all others would add nothing.

    Attributes:
        live_R: whether a row is chosen, bool.
        rank_R: number of chosen rows up to each row, inclusive, int32.
        row_R: indices of the chosen rows, ascending, int32; only the first ``rank_R[-1]`` entries are valid.
    """

    live_R: Tensor
    rank_R: Tensor
    row_R: Tensor


class LossPasses(NamedTuple):
    """Functions of an implementation, without autograd.

    Attributes:
        labels: (tokens_BU, rows) to the label of every row, int32.
        product: (h_RH, weight_VH, bias_V, label_R, first, rows) to logits_RV and their :class:`Statistics`. Unused
            rows of h may be undefined, and may be overwritten.
        recursion: (statistics, rows) to :class:`Recursion`.
        transitions: (statistics, recursion, d_loss_B, rows) to :class:`Transitions`.
        choose: (transitions, label_R, d_loss_B, dtype) to the rows that contribute to gradients in ``dtype``.
        gradient: (logits_RV, d_logits_RV, lse_R, transitions, label_R, first, chosen) writes the gradient of the
            logits to ``d_logits_RV``, which may be ``logits_RV``, and returns its sums over the rows, (V,), at least
            fp32. Rows that are not chosen stay unchanged, or become zero.
        weight_gradient: (d_logits_RV, h_RH, first, chosen) to (V, H), at least fp32.
        input_gradient_: (d_logits_RV, weight_VH, h_RH, first, chosen) replaces h by its gradient where it is not
            zero; zeros, and rows that are not chosen, stay unchanged.
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
    """Check that tokens have the shape of the rows.

    Raises:
        ValueError: they do not.
    """
    if tuple(tokens_BU.shape) != (rows.utterances, rows.most_tokens):
        raise ValueError(f"tokens must be ({rows.utterances}, {rows.most_tokens}), not {tuple(tokens_BU.shape)}")


class JointLoss(Function):
    """Autograd function from the outputs of both networks, through the joint network, to the loss.

    It saves the hidden layer and the logits, and backward overwrites both with their gradients. With ``parts`` above
    1, logits exist for one part of the rows at a time, and are recomputed in backward.
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
    """Return the rows in ``parts`` slices of equal size, except the last."""
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
    """Return the loss of each utterance from the outputs of both networks.

    Args:
        joint, loss: implementations.
        weight_VH, bias_V: last layer of the joint network, whose last class is blank.
        tokens_BU: integers, 0 ... V - 2; not read beyond an utterance's length.
        dropout: dropout of the joint network's hidden layer.
        parts: number of parts of the rows; logits exist for one part at a time.

    Returns:
        Negative logarithm of the probability of the tokens, (B,) fp32 (fp64 for fp64); infinite, without gradient,
        for an utterance without frames. The backward pass can run only once, and is not differentiable.
    """
    check_tokens(tokens_BU, rows)
    loss_B: Tensor = JointLoss.apply(joint, loss, f_SBH, g_NBH, weight_VH, bias_V, tokens_BU, rows, dropout, parts)
    return loss_B
