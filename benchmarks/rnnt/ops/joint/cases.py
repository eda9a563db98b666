"""Test and benchmark cases of the joint network's hidden layer: packed rows with the lengths of LibriSpeech."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.rnnt.ops.joint import JointPasses
from benchmarks.rnnt.ops.rows_of_cases import FACTS, UTTERANCES, case_rows, networks
from common.ops.cases import Case, Draw, Pass
from common.ops.dropout.reference import DropoutMask


def passes(
    function: JointPasses,
    draw: Draw,
    utterances: int | Sequence[tuple[int, int]],
    width: int,
    p: float,
    live: float = 1.0,
) -> list[Pass]:
    """Return the forward pass, which writes rows, and the backward pass, which reads the gradient of rows.

    Args:
        width: features of a row.
        p: probability of dropout.
        live: fraction of the rows that have a gradient.
    """
    rows, used = case_rows(utterances, draw.device)
    f, g = networks(rows, width, draw)
    dropout = DropoutMask(p, draw.seed(), 7)
    h, dh = function.forward(f, g, rows, dropout), draw.normal(rows.capacity, width)
    live_R = (draw.uniform(rows.capacity) < live) & (torch.arange(rows.capacity, device=draw.device) < used)
    dh.masked_fill_(h == 0, 0).masked_fill_(~live_R[:, None], torch.nan)
    moved = float((used * width + f.numel() + g.numel()) * draw.dtype.itemsize)
    return [
        Pass("forward", lambda: function.forward(f, g, rows, dropout)[:used], moved),
        Pass(
            "backward",
            lambda: function.backward(dh, live_R, len(f), len(g), rows, dropout),
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
            {"utterances": ((18, 2), (0, 2), (3, 1)), "width": 9, "p": 0.5, "live": 0.6},
            {"utterances": ((5, 4),), "width": 12, "p": 0.0},
        ],
        gpu={"utterances": 8},
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
    ),
)
