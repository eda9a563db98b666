"""Stamps of the device's clock against CUDA's events, eager and captured."""

from __future__ import annotations

import pytest
import torch

from common.ops.device_clock import milliseconds, stamp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CYCLES = 20_000_000  # about 10 ms


def moments() -> torch.Tensor:
    return torch.zeros((2, 1), dtype=torch.int64, device="cuda")


def test_the_time_between_two_stamps_is_that_between_two_events() -> None:
    taken = moments()
    stamp(taken[0])
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    stamp(taken[0])
    torch.cuda._sleep(CYCLES)
    stamp(taken[1])
    end.record()
    end.synchronize()
    assert milliseconds(taken[0], taken[1]).item() == pytest.approx(begin.elapsed_time(end), rel=0.05)


def test_every_replay_of_a_graph_stamps_anew() -> None:
    taken = moments()
    stamp(taken[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stamp(taken[0])
        torch.cuda._sleep(CYCLES)
        stamp(taken[1])
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(taken.flatten().tolist())
    assert all(0 < after - before < 1e9 for before, after in seen)
    assert seen[0][1] < seen[1][0]
    assert seen[1][1] < seen[2][0]
