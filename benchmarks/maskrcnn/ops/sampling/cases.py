"""Cases of the sampling: anchors and proposals of 12 pictures of 800 x 1344 pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from common.ops.cases import Case, Draw, Pass, size_of

STREAM = 1


def passes(
    function: Callable[..., Any],
    draw: Draw,
    candidates: int,
    count: int,
    most_positive: int,
    shares: Sequence[tuple[float, float]],
) -> list[Pass]:
    """Make the forward pass, which draws a sample in each picture.

    Args:
        candidates: number of candidates in a picture.
        count: number of candidates in a sample.
        most_positive: largest number of positives in a sample.
        shares: for each picture, the fractions of its candidates that are positive and negative. Others are ignored.
    """
    positive, negative = torch.tensor(shares, device=draw.device).view(-1, 2, 1).unbind(1)
    value = draw.uniform(len(shares), candidates, dtype=torch.float32)
    label = torch.where(value < positive, 1, torch.where(value < positive + negative, 0, -1)).to(torch.int8)
    seed = draw.seed().view(1)
    return [Pass("forward", lambda: function(label, seed, STREAM, count, most_positive), size_of(label))]


RECIPE = {"shares": ((0.01, 0.65),) * 12}
"""One per cent of the candidates is positive, and a third is ignored."""
EACH = ((0.3, 0.3), (0.3, 0.0), (0.0, 0.3), (0.0, 0.0), (0.05, 0.9))
"""Pictures with positives and negatives, with positives only, with negatives only, with neither, with few positives."""
RARE = ((0.0, 0.9), (0.0001, 0.9), (0.5, 0.4), (0.0, 0.0001), (0.0, 0.0))

CASES = (
    Case(
        "anchors",
        passes,
        {"candidates": 268_569, "count": 256, "most_positive": 128, **RECIPE},
        tests=[
            {"candidates": 2500, "count": 100, "most_positive": 40, "shares": EACH},
            {"candidates": 301, "count": 40, "most_positive": 40, "shares": EACH},
            {"candidates": 30, "count": 50, "most_positive": 5, "shares": EACH},
            {"candidates": 9, "count": 4, "most_positive": 0, "shares": EACH},
            {"candidates": 1, "count": 3, "most_positive": 3, "shares": EACH},
            {"candidates": 0, "count": 4, "most_positive": 2, "shares": EACH},
        ],
        gpu={"shares": RARE},
        dtypes=(torch.bfloat16,),
    ),
    Case(
        "proposals",
        passes,
        {"candidates": 10_096, "count": 512, "most_positive": 128, **RECIPE},
        gpu={},
        dtypes=(torch.bfloat16,),
    ),
)
