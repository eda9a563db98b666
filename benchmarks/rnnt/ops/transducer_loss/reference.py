"""Reference of :mod:`benchmarks.rnnt.ops.transducer_loss`.

The recursions run over anti-diagonals, for alpha and beta of all utterances at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rnnt.ops.transducer_loss.passes import (
    NO_LABEL,
    NO_ROW,
    Chosen,
    LossPasses,
    Recursion,
    Statistics,
    Transitions,
)
from benchmarks.rnnt.packed_rows import PackedRows, row_indices
from common.ops.triton_support import widen

IMPOSSIBLE = -1e30
"""Logarithm of probability zero; finite, so that differences are not NaN."""


def labels_reference(tokens_BU: Tensor, rows: PackedRows) -> Tensor:
    """Return the token that each row can emit, (R,) int32.

    It is ``NO_LABEL`` after the last token, and ``NO_ROW`` for unused rows.
    """
    reserved = row_indices(rows)
    after_R = reserved.token_R >= rows.tokens_B[reserved.utterance_R]
    if tokens_BU.shape[1]:
        label_R = tokens_BU[reserved.utterance_R, reserved.token_R.clamp(max=tokens_BU.shape[1] - 1)].int()
    else:
        label_R = torch.full_like(after_R, NO_LABEL, dtype=torch.int32)
    return label_R.masked_fill_(after_R, NO_LABEL).masked_fill_(~reserved.exists_R, NO_ROW)


def _statistics(logits_RV: Tensor, label_R: Tensor) -> Statistics:
    """Return the statistics of logits, whose last class is blank."""
    widened_RV = widen(logits_RV).masked_fill((label_R == NO_ROW)[:, None], 0)
    lse_R = widened_RV.logsumexp(1)
    label_R1 = label_R.clamp(min=0).long()[:, None]
    of_label_R = (widened_RV.gather(1, label_R1)[:, 0] - lse_R).masked_fill_(label_R < 0, IMPOSSIBLE)
    return Statistics(lse_R, widened_RV[:, -1] - lse_R, of_label_R)


def product_reference(
    h_RH: Tensor, weight_VH: Tensor, bias_V: Tensor, label_R: Tensor, first: int, rows: PackedRows
) -> tuple[Tensor, Statistics]:
    """Return logits (R, V) and their statistics; unused rows of h, which may be undefined, are set to zero."""
    h_RH.masked_fill_((label_R == NO_ROW)[:, None], 0)
    logits_RV = torch.nn.functional.linear(h_RH, weight_VH, bias_V)
    return logits_RV, _statistics(logits_RV, label_R)


def recursion_reference(statistics: Statistics, rows: PackedRows) -> Recursion:
    """Compute alpha and beta in one loop; beta's coordinates count from the last frame and token."""
    columns = rows.most_tokens + 1
    diagonals = rows.most_frames + columns - 1
    step_D11 = torch.arange(diagonals, device=rows.device)[:, None, None]
    column_N = torch.arange(columns, device=rows.device)
    frames_B1, tokens_B1 = rows.frames_B.long()[:, None], rows.tokens_B.long()[:, None]
    frame_DBN = (step_D11 - column_N).expand(-1, rows.utterances, -1)
    inside_DBN = (frame_DBN >= 0) & (frame_DBN < frames_B1) & (column_N <= tokens_B1)
    start_B1, width_B1 = rows.offsets[:-1, None], tokens_B1 + 1
    ahead_DBN = start_B1 + frame_DBN * width_B1 + column_N
    behind_DBN = start_B1 + (frames_B1 - 1 - frame_DBN) * width_B1 + tokens_B1 - column_N
    most = max(rows.capacity - 1, 0)

    def taken(values_R: Tensor, row_DBN: Tensor, known_DBN: Tensor, other: float) -> Tensor:
        return torch.where(known_DBN, values_R[row_DBN.clamp(0, most)], other)

    has_label_DBN = inside_DBN & (column_N > 0)
    blank_D2BN = torch.stack(
        (
            taken(statistics.blank_R, ahead_DBN - width_B1, inside_DBN & (frame_DBN > 0), 0.0),
            taken(statistics.blank_R, behind_DBN, inside_DBN, 0.0),
        ),
        1,
    )
    label_D2BN = torch.stack(
        (
            taken(statistics.label_R, ahead_DBN - 1, has_label_DBN, IMPOSSIBLE),
            taken(statistics.label_R, behind_DBN, has_label_DBN, IMPOSSIBLE),
        ),
        1,
    )
    before = torch.full_like(blank_D2BN[0], IMPOSSIBLE)
    before[..., 0].zero_()
    shifted = torch.full_like(before, IMPOSSIBLE)
    found_D2BN = torch.empty_like(blank_D2BN)
    for step in range(diagonals):
        shifted[..., 1:] = before[..., :-1]
        before = torch.logaddexp(before + blank_D2BN[step], shifted + label_D2BN[step], out=found_D2BN[step])
    reserved = row_indices(rows)
    own_frames_R, own_tokens_R = frames_B1[reserved.utterance_R, 0], tokens_B1[reserved.utterance_R, 0]
    left_R = (own_tokens_R - reserved.token_R).clamp(0, columns - 1)
    remaining_R = (own_frames_R - 1 - reserved.frame_R + left_R).clamp(0, diagonals - 1)
    alpha_R = found_D2BN[
        (reserved.frame_R + reserved.token_R).clamp(max=diagonals - 1), 0, reserved.utterance_R, reserved.token_R
    ]
    beta_R = found_D2BN[remaining_R, 1, reserved.utterance_R, left_R]
    last_B = (rows.frames_B.long() - 1 + rows.tokens_B.long()).clamp(0, diagonals - 1)
    utterance_B = torch.arange(rows.utterances, device=rows.device)
    total_B = found_D2BN[last_B, 1, utterance_B, rows.tokens_B.long()]
    total_B = total_B.masked_fill(rows.frames_B == 0, -torch.inf)
    return Recursion(alpha_R, beta_R, total_B)


def transitions_reference(
    statistics: Statistics, recursion: Recursion, d_loss_B: Tensor, rows: PackedRows
) -> Transitions:
    """Return the occupancy of each arc times the loss's gradient."""
    reserved = row_indices(rows)
    own_frames_R = rows.frames_B.long()[reserved.utterance_R]
    own_tokens_R = rows.tokens_B.long()[reserved.utterance_R]
    row_R = torch.arange(rows.capacity, device=rows.device)
    most = max(rows.capacity - 1, 0)
    alpha_R, beta_R, total_B = recursion
    last_frame_R, last_token_R = reserved.frame_R + 1 >= own_frames_R, reserved.token_R >= own_tokens_R
    below_R = beta_R[(row_R + own_tokens_R + 1).clamp(max=most)]
    below_R = torch.where(last_frame_R, torch.where(last_token_R, 0.0, IMPOSSIBLE), below_R)
    right_R = beta_R[(row_R + 1).clamp(max=most)].masked_fill(last_token_R, IMPOSSIBLE)
    before_R = alpha_R - total_B[reserved.utterance_R]
    d_loss_R = d_loss_B.to(alpha_R.dtype)[reserved.utterance_R]

    def used(arc_R: Tensor, after_R: Tensor) -> Tensor:
        return ((before_R + arc_R + after_R).exp() * d_loss_R).masked_fill(~reserved.exists_R, 0)

    return Transitions(used(statistics.blank_R, below_R), used(statistics.label_R, right_R))


def choose_reference(transitions: Transitions, label_R: Tensor, d_loss_B: Tensor, dtype: torch.dtype) -> Chosen:
    """Choose all rows that exist, which are the first ones."""
    live_R = label_R != NO_ROW
    row_R = torch.arange(len(label_R), dtype=torch.int32, device=label_R.device)
    return Chosen(live_R, live_R.cumsum(0, dtype=torch.int32), row_R)


def gradient_reference(
    logits_RV: Tensor,
    d_logits_RV: Tensor,
    lse_R: Tensor,
    transitions: Transitions,
    label_R: Tensor,
    first: int,
    chosen: Chosen,
) -> Tensor:
    """Write the gradient of the logits to ``d_logits_RV``, zero in unused rows; return its sums over the rows, (V,)."""
    through_R = transitions.blank_R + transitions.label_R
    d_RV = (widen(logits_RV) - lse_R[:, None]).exp_() * through_R[:, None]
    d_RV[:, -1] -= transitions.blank_R
    d_RV.scatter_add_(1, label_R.clamp(min=0).long()[:, None], -transitions.label_R[:, None])
    d_RV.masked_fill_((label_R == NO_ROW)[:, None], 0)
    d_logits_RV.copy_(d_RV)
    return d_RV.sum(0)


def weight_gradient_reference(d_logits_RV: Tensor, h_RH: Tensor, first: int, chosen: Chosen) -> Tensor:
    """Return the gradient of the weight, (V, H), at least fp32."""
    return widen(d_logits_RV).t() @ widen(h_RH)


def input_gradient_reference_(d_logits_RV: Tensor, weight_VH: Tensor, h_RH: Tensor, first: int, chosen: Chosen) -> None:
    """Overwrite ``h_RH`` with its gradient, which is zero where h is zero (the gradient through ReLU and dropout)."""
    h_RH.copy_(torch.where(h_RH == 0, 0.0, d_logits_RV @ weight_VH))


PASSES = LossPasses(
    labels_reference,
    product_reference,
    recursion_reference,
    transitions_reference,
    choose_reference,
    gradient_reference,
    weight_gradient_reference,
    input_gradient_reference_,
)
