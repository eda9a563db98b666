"""Captures of CUDA graphs for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from common.ops.cases import Draw
from common.ops.fp8_cast.reference import Scaling
from common.step.capture import capturing

T = TypeVar("T")


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run ``step`` twice and capture it. The second run must not wait for the device.

    Returns:
        The graph, and the results of the captured ``step``, which each replay writes.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with capturing(graph, stream):
            found = step()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, found


def follows_its_inputs(
    step: Callable[[list[Scaling]], list[Tensor]], change: Callable[[], Any], scales: int
) -> list[Tensor]:
    """Check that each of three replays of a captured step gives the results and scales of the eager step.

    Args:
        step: takes the states of its scales.
        change: changes the inputs before each replay.
        scales: number of states.

    Returns:
        The first tensor of ``step`` in every replay.
    """
    draw, seen = Draw(torch.device("cuda"), torch.bfloat16), []
    ours, eager = ([draw.scaling() for _ in range(scales)] for _ in range(2))
    graph, results = captured(lambda: step(ours))
    for state in ours:
        state.scale.zero_()
    for _ in range(3):
        change()
        for tensor in results:
            tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 255)
        graph.replay()
        for found, expected in zip(results, step(eager), strict=True):
            assert torch.equal(found, expected)
        seen.append(results[0].detach().clone())
    assert [state.scale.item() for state in ours] == [state.scale.item() for state in eager]
    return seen
