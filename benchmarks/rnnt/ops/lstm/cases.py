"""Test and benchmark cases of the LSTM: one layer of the encoder."""

from __future__ import annotations

import torch

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.ops.lstm.reference import GATES, Lstm, LstmWeights
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Case, Draw, Pass, both_ways, size_of

WIDTH = fixed_facts(Facts, "rnnt").encoder_width


def passes(
    function: Lstm, draw: Draw, frames: int, utterances: int, inputs: int, width: int, lengths: str
) -> list[Pass]:
    """Return the forward and backward pass.

    Bytes count inputs, weights and outputs, the gates that forward writes and reads again, and the states of the
    cells.

    Args:
        frames: frames of the longest utterance.
        inputs: features of the input.
        width: features of the output.
        lengths: ``equal``, ``sorted`` from the longest to the shortest, or ``mixed``.
    """
    x = draw.normal(frames, utterances, inputs)
    weights = LstmWeights(
        draw.normal(GATES * width, inputs, scale=inputs**-0.5),
        *(draw.normal(GATES * width, *shape, scale=0.5 * width**-0.5) for shape in ((width,), (), ())),
    )
    dy = draw.normal(frames, utterances, width)
    frames_B = draw.integers(0, frames + 1, utterances, dtype=torch.int32)
    frames_B[0] = frames
    if lengths != "mixed":
        frames_B = frames_B.sort(descending=True).values if lengths == "sorted" else frames_B.fill_(frames)
    state, gates = size_of(dy), GATES * size_of(dy)
    matrices = size_of(weights.ih_GI, weights.hh_GH)
    flops = 2.0 * GATES * width * frames * utterances * (inputs + width)
    return both_ways(
        lambda: function(x, weights, frames_B),
        [x, *weights],
        [dy],
        moved=(
            size_of(x) + 2 * gates + 2 * state + matrices,
            2 * size_of(x) + 3 * gates + 3 * state + 2 * matrices,
        ),
        flops=(flops, 2 * flops),
    )


CASES = (
    Case(
        "LibriSpeech",
        passes,
        {"frames": 205, "utterances": 192, "inputs": WIDTH, "width": WIDTH, "lengths": "equal"},
        tests=[
            {"frames": 5, "utterances": 3, "inputs": 7, "width": 9, "lengths": "mixed"},
            {"frames": 3, "utterances": 1, "inputs": 256, "width": 128},
        ],
        gpu={"frames": 24, "inputs": 256, "lengths": "sorted"},
        dtypes=(torch.bfloat16, torch.float16),
        tolerance=2.0,
    ),
)
