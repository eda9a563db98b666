"""One layer of the encoder over frames of one length; batches are utterances."""

from __future__ import annotations

import torch

from benchmarks.rnnt.ops import lstm
from benchmarks.rnnt.ops.lstm import Lstm, LstmWeights
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep

FRAMES, WIDTH = 205, 1024
"""Of the average utterance once two frames are joined, and of the encoder."""
LAYERS = 5
"""Of a step, though two of them run over twice as many frames, and other inputs."""


def case(function: Lstm, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Input and gates are read and written once, weights once each; of the states the cell is kept, too."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=cases.DEVICE).mul_(WIDTH**-0.5).to(dtype).requires_grad_()

    x = normal(FRAMES, batch, WIDTH)
    weights = LstmWeights(normal(4 * WIDTH, WIDTH), normal(4 * WIDTH, WIDTH), normal(4 * WIDTH), normal(4 * WIDTH))
    lengths = torch.full((batch,), FRAMES, dtype=torch.int32, device=cases.DEVICE)
    state, matrix = x.numel() * dtype.itemsize, weights.hh_GH.numel() * dtype.itemsize
    flops = 2.0 * 2 * x.numel() * 4 * WIDTH
    return both_ways(
        lambda: function(x, weights, lengths),
        [x, *weights],
        [torch.full((FRAMES, batch, WIDTH), 0.01, device=cases.DEVICE).to(dtype)],
        moved=(float(11 * state + 2 * matrix), float(17 * state + 4 * matrix)),
        flops=(flops, 2 * flops),
    )


def entries() -> list[Entry]:
    """Every implementation but the reference, which is a loop in Python."""
    sizes = {"inputs": WIDTH, "width": WIDTH}
    return each("lstm", lstm.LSTM, "persistent", sizes, case, calls=LAYERS, only=list(lstm.LSTM.fast))


def sweeps() -> dict[str, Sweep]:
    """None: ``python -m benchmarks.rnnt.ops.lstm_bench --plans`` times the divisions."""
    return {}
