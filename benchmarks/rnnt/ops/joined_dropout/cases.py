"""Cases of dropout with joined frames: the output of the encoder's first part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.ops.joined_dropout.reference import JOINED
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Case, Draw, Pass, both_ways, size_of

FACTS = fixed_facts(Facts, "rnnt")


def passes(
    function: Callable[..., Tensor], draw: Draw, frames: int, utterances: int, width: int, p: float
) -> list[Pass]:
    """Make the forward and backward pass."""
    x_TBH, seed = draw.normal(frames, utterances, width), draw.seed()
    dy_SBK = draw.normal(-(-frames // JOINED), utterances, JOINED * width)
    moved = 2 * size_of(x_TBH)
    return both_ways(lambda: function(x_TBH, p, seed, 3), [x_TBH], [dy_SBK], moved=(moved, moved))


CASES = (
    Case(
        "LibriSpeech",
        passes,
        {"frames": 642, "utterances": 192, "width": FACTS.encoder_width, "p": FACTS.encoder_dropout},
        tests=[
            {"frames": 4, "utterances": 3, "width": 6, "p": 0.3},
            {"frames": 5, "utterances": 1, "width": 2, "p": 0.5},
            {"frames": 3, "utterances": 3, "width": 2050},
            {"frames": 3, "utterances": 2, "width": 4, "p": 0.0},
            {"frames": 0, "utterances": 2, "width": 4},
        ],
        gpu={"frames": 321},
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        exact=True,
    ),
)
