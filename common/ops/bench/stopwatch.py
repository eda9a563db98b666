"""Time of captured work on a GPU, and the bandwidth of a copy to compare it with."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

COPY_BYTES = 4 * 1024**3

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16/fp16 matrix FLOP/s of a GPU, by a part of its name (vendor's data sheets)."""


def peak_flops(gpu: str) -> float | None:
    """Of a GPU with this name; None where it is not known."""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in gpu), None)


def time_graph(launches: Callable[[], int]) -> float:
    """Median milliseconds per launch of a captured series; ``launches`` enqueues it and returns how many it holds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launches()
        with torch.cuda.graph(graph, stream=stream):
            count = launches()
        return median_ms(graph.replay, 5) / count


def copy_bandwidth() -> float:
    """Bytes read plus written per second by a large device-to-device copy."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.float16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (median_ms(lambda: target.copy_(source), 8) * 1e-3)


def median_ms(run: Callable[[], object], times: int) -> float:
    """Median milliseconds of ``run`` on the current stream; waits for the device."""
    events = []
    for _ in range(times):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)
