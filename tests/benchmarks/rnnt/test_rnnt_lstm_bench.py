"""Test the lengths that the benchmark of the LSTM draws."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rnnt.ops import lstm_bench


def test_made_up_lengths_are_those_of_utterances_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm_bench, "CUDA", torch.device("cpu"))
    assert lstm_bench.lengths_of(8, 30, real=False).tolist() == [30] * 8
    torch.manual_seed(0)
    lengths = lstm_bench.lengths_of(4096, 600, real=True)
    assert lengths[0] == 600
    assert (lengths.diff() <= 0).all()
    assert lengths.min() >= 30
    assert abs(lengths.float().mean() / 600 - lstm_bench.MEAN) < 0.02
