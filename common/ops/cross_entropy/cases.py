"""Cases of the loss over the vocabulary or over a part of it. The gradient overwrites the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.cross_entropy import NO_LABEL, OfAPart
from common.ops.sizes import gpt3
from common.ops.sizes import transformer as size

WINNER = 30.0
"""A logit larger than all random ones."""


def passes(
    function: Callable[..., tuple[Tensor, Tensor]],
    draw: Draw,
    rows: int,
    columns: int,
    vocabulary: int,
    inplace: bool = True,
    labels: torch.dtype = torch.int32,
) -> list[Pass]:
    """Make the forward and backward passes.

    About as in BERT, one row in 20 has no label. The other rows are of four kinds, a quarter each: the label wins; it
    ties with a later word, which counts as correct; it ties with an earlier word, which counts as wrong; all logits are
    random. Padding and rows without a label contain NaN.
    """
    row, column = (torch.arange(count, device=draw.device) for count in (rows, columns))
    label, kind = draw.integers(1, vocabulary - 1, rows), row % 4
    other = label + torch.tensor([0, 1, -1, 0], device=draw.device)[kind]
    winner = ((column == label[:, None]) | (column == other[:, None])) & (kind < 3)[:, None]
    label = label.masked_fill(row % 20 == 19, NO_LABEL)
    nothing = (label == NO_LABEL)[:, None] | (column >= vocabulary)
    logits = draw.normal(rows, columns, scale=4.0).masked_fill(winner, WINNER).masked_fill(nothing, float("nan"))
    logits.requires_grad_()
    label, d_losses = label.to(labels), draw.normal(rows, dtype=torch.float32)

    def backward() -> tuple[Any, ...]:
        (d_logits,) = torch.autograd.grad(function(logits, label, vocabulary, inplace)[0], logits, d_losses)
        return d_logits, None if inplace else logits

    unit = size_of(logits)
    return [
        Pass("forward", lambda: function(logits, label, vocabulary, inplace), unit),
        Pass("backward", backward, 2 * unit, after="forward"),
    ]


def part_passes(function: OfAPart, draw: Draw, rows: int, columns: int, words: int) -> list[Pass]:
    """Make the passes of both functions. Padding and rows without a label contain NaN.

    One label in three belongs to another part of the vocabulary, and one row in five has no label.
    """
    row = torch.arange(rows, device=draw.device)
    labels = draw.integers(0, max(words, 1), rows)
    labels = torch.where((row % 3 == 0) | (labels >= words), columns, labels)
    scored = row % 5 != 4
    labels = labels.masked_fill(~scored, NO_LABEL)
    nothing = ~scored[:, None] | (torch.arange(columns, device=draw.device) >= words)
    logits = draw.normal(rows, columns, scale=3.0).masked_fill(nothing, float("nan"))
    lse = draw.uniform(rows, low=9.0, high=14.0, dtype=torch.float32).masked_fill(~scored, float("nan"))
    d_losses = draw.normal(rows, dtype=torch.float32)
    unit = size_of(logits)
    return [
        Pass("log-sum-exp", lambda: function.log_sum_exp(logits, labels, words).where(scored, 0.0), unit),
        Pass("gradient", lambda: (function.gradient(d_losses, logits, labels, lse, words), logits), 2 * unit),
    ]


SIZES = {"rows": size.PACKS * size.MASKED, "columns": size.PADDED_VOCABULARY}

CASES = (
    Case(
        "BERT-large",
        passes,
        {**SIZES, "vocabulary": size.VOCABULARY},
        tests=[
            {"rows": 23, "columns": 64, "vocabulary": 61},
            {"rows": 23, "columns": 9024, "vocabulary": 9001, "labels": torch.int64},
            {"rows": 5, "columns": 4096, "vocabulary": 4096, "inplace": False},
        ],
        gpu={"rows": 300},
    ),
)

OF_A_PART = (
    Case(
        "GPT-3, the last of four ranks",
        part_passes,
        {"rows": gpt3.TOKENS, "columns": 12672, "words": 12241},
        tests=[
            {"rows": 16, "columns": 128, "words": 30},
            {"rows": 6, "columns": 128, "words": 0},
            {"rows": 11, "columns": 4224, "words": 4200},
        ],
        gpu={"rows": 300},
    ),
)
