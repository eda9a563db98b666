"""Measure the time of work in a CUDA graph, and the bandwidth of a copy for comparison."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

COPY_BYTES = 4 * 1024**3

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Peak FLOP/s of dense bf16/fp16 matrix products from data sheets, by a part of the name of the GPU."""


def peak_flops(gpu: str) -> float | None:
    """Return the peak FLOP/s of the GPU with this name, or None if unknown; see :data:`PEAK_FLOPS`."""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in gpu), None)


def time_graph(launches: Callable[[], int]) -> float:
    """Return the median milliseconds per launch in a CUDA graph of ``launches``, which returns their number."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launches()
        with torch.cuda.graph(graph, stream=stream):
            count = launches()
        return median_ms(graph.replay, 5) / count


def copy_bandwidth() -> float:
    """Return the bytes per second, read plus written, of a large device-to-device copy."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.float16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (median_ms(lambda: target.copy_(source), 8) * 1e-3)


def median_ms(run: Callable[[], object], times: int) -> float:
    """Return the median milliseconds of ``times`` calls of ``run`` on the current stream. Waits for the device."""
    events = []
    for _ in range(times):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)
