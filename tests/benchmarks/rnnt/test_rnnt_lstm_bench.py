"""What the benchmark of the LSTM measures, and the lengths that it makes up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.rnnt.ops import lstm, lstm_bench
from benchmarks.rnnt.ops.lstm import LstmWeights
from benchmarks.rnnt.ops.lstm.bench_cases import FRAMES, WIDTH, entries, sweeps
from common.ops.bench import cases
from common.ops.operation import Implementation


def shapes_only(x: Tensor, weights: LstmWeights, lengths: Tensor) -> Tensor:
    """A result of the right shape that everything has a gradient through."""
    gates = x @ weights.ih_GI.t() + weights.bias_ih_G + weights.bias_hh_G
    return gates[..., :WIDTH] @ weights.hh_GH[:WIDTH]


def test_a_layer_reads_and_writes_its_gates_and_multiplies_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "DEVICE", "meta")
    for name in lstm.LSTM.fast:
        monkeypatch.setitem(lstm.LSTM.fast, name, Implementation(shapes_only))
    found = entries()
    assert {entry.name: entry.calls > 0 for entry in found} == {"lstm persistent": True, "lstm library": False}
    for entry in found:
        forward, backward = entry.build(192, torch.float16)
        state, matrix = FRAMES * 192 * WIDTH * 2, 4 * WIDTH * WIDTH * 2
        assert forward.bytes == state * (1 + 4 + 4 + 1 + 1) + 2 * matrix
        assert backward.bytes == state * (1 + 4 + 1 + 4 + 4 + 1 + 1 + 1) + 4 * matrix
        assert backward.flops == 2 * forward.flops == 4 * (FRAMES * 192) * (2 * 4 * WIDTH * WIDTH)
        backward.run()
    assert not sweeps()


def test_made_up_lengths_are_those_of_utterances_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm_bench, "CUDA", torch.device("cpu"))
    assert lstm_bench.lengths_of(8, 30, real=False).tolist() == [30] * 8
    torch.manual_seed(0)
    lengths = lstm_bench.lengths_of(4096, 600, real=True)
    assert lengths[0] == 600
    assert (lengths.diff() <= 0).all()
    assert lengths.min() >= 30
    assert abs(lengths.float().mean() / 600 - lstm_bench.MEAN) < 0.02
