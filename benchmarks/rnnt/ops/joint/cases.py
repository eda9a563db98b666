"""Cases of the joint network's hidden layer: packed rows of utterances with the lengths of LibriSpeech."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.rnnt.ops.joint.reference import JointPasses
from benchmarks.rnnt.ops.rows_of_cases import FACTS, UTTERANCES, case_rows, networks
from common.ops.cases import Case, Draw, Pass
from common.ops.dropout.reference import DropoutMask


def passes(
    function: JointPasses,
    draw: Draw,
    utterances: int | Sequence[tuple[int, int]],
    width: int,
    p: float,
    masked: bool = False,
    some: bool = False,
) -> list[Pass]:
    """Make the forward pass, which writes rows, and the backward pass, which reads the gradient of rows.

    Args:
        utterances: see :func:`benchmarks.rnnt.ops.rows_of_cases.case_rows`.
        width: features of a row.
        p: probability of dropout.
        masked: whether backward also gets the result and masks the gradient where the result is zero. Otherwise the
            gradient is already zero there.
        some: whether backward gets the gradient of only some rows.
    """
    rows, used = case_rows(utterances, draw.device)
    f, g = networks(rows, width, draw)
    dropout = DropoutMask(p, draw.seed(), 7)
    h, dh = function.forward(f, g, rows, dropout), draw.normal(rows.capacity, width)
    live = draw.uniform(rows.capacity) < 0.6 if some else None
    if not masked:
        dh.masked_fill_(h == 0, 0)
    dead = torch.arange(rows.capacity, device=draw.device) >= used
    dh.masked_fill_((dead if live is None else dead | ~live)[:, None], torch.nan)
    moved = float((used * width + f.numel() + g.numel()) * draw.dtype.itemsize)
    return [
        Pass("forward", lambda: function.forward(f, g, rows, dropout)[:used], moved),
        Pass(
            "backward",
            lambda: function.backward(dh, h if masked else None, live, len(f), len(g), rows, dropout),
            moved,
        ),
    ]


CASES = (
    Case(
        "LibriSpeech",
        passes,
        {"utterances": UTTERANCES, "width": FACTS.joint_width, "p": FACTS.joint_dropout},
        tests=[
            {"utterances": ((5, 1), (1, 3), (66, 0), (18, 1)), "width": 16, "p": 0.25},
            {"utterances": ((18, 2), (0, 2), (3, 1)), "width": 9, "p": 0.5, "masked": True, "some": True},
            {"utterances": ((5, 4),), "width": 12, "p": 0.0},
        ],
        gpu={"utterances": 8},
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
    ),
)
