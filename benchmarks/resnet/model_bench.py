"""Measure ResNet-50's forward and backward pass in one CUDA graph, and where its time goes.

``python -m benchmarks.resnet.model_bench --batch 400 --implementations triton,torch`` prints ms per pass, images/s and
kernel time by category, without data, optimizer or communication: the floor under a training step.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import defaultdict

import torch

from benchmarks.resnet.config import Facts
from benchmarks.resnet.model import ResNet50, smoothed_cross_entropy
from common.mlperf.fixed import fixed_facts

CATEGORIES = (
    ("BN moments", r"^moments_kernel"),
    ("BN normalise", r"^normalise_kernel"),
    ("BN gradient sums", r"^gradient_sums_kernel"),
    ("BN input gradient", r"^input_gradient_kernel"),
    ("BN finalise", r"^(statistics|coefficients|group_)\w*kernel"),
    ("stem pool", r"^pool_"),
    ("pool", r"max_pool|MaxPool"),
    ("BN library", r"bn_|batch_norm|BatchNorm|batchnorm"),
    ("conv forward", r"fprop|Fprop"),
    ("conv dgrad", r"dgrad|Dgrad"),
    ("conv wgrad", r"wgrad|Wgrad"),
    ("matrix product", r"gemm|nvjet|cutlass|splitK"),
)
"""Category to the pattern of its kernels' names; the first that matches counts."""


def build(batch: int, dtype: torch.dtype, implementation: str) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, str]:
    """Capture one forward and backward pass over a static random batch.

    Returns:
        The graph, its loss (0-d fp32) and the name of the batch norm implementation.
    """
    torch.backends.cudnn.benchmark = True
    architecture = fixed_facts(Facts, "resnet").architecture(width=64, input_channels=4)
    model = ResNet50(architecture, torch.Generator().manual_seed(0)).cuda().cast(dtype)
    chosen = model.choose_implementation(implementation)
    image = torch.randn(batch, 4, 224, 224, device="cuda")
    image[:, 3] = 0
    image = image.to(dtype).contiguous(memory_format=torch.channels_last)
    label = torch.randint(0, 1000, (batch,), device="cuda")

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = smoothed_cross_entropy(model(image), label, 0.1, "sum")
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            loss = step()
    torch.cuda.synchronize()
    return graph, loss, chosen


def categories(graph: torch.cuda.CUDAGraph, replays: int, top: int) -> None:
    """Print kernel milliseconds per replay by category, and the longest kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    by_category: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.key_averages():
        time_ms, count = event.self_device_time_total / 1e3 / replays, event.count / replays
        category = next((name for name, pattern in CATEGORIES if re.search(pattern, event.key)), "other")
        for table, key in ((by_category, category), (by_name, f"[{category}] {event.key[:110]}")):
            table[key][0] += time_ms
            table[key][1] += count
    total = sum(time_ms for time_ms, _ in by_category.values())
    print(f"  kernels together {total:.2f} ms")
    for table, limit in ((by_category, len(by_category)), (by_name, top)):
        for key, (time_ms, count) in sorted(table.items(), key=lambda item: -item[1][0])[:limit]:
            print(f"  {time_ms:8.3f} ms  {count:5.0f} x  {key}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=400)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--implementations", default="triton,torch")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--top", type=int, default=25)
    arguments = parser.parse_args()
    for implementation in arguments.implementations.split(","):
        graph, loss, chosen = build(arguments.batch, getattr(torch, arguments.dtype), implementation)
        times = []
        for _ in range(arguments.replays):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            times.append((start, stop))
        torch.cuda.synchronize()
        time_ms = statistics.median(start.elapsed_time(stop) for start, stop in times)
        print(
            f"{chosen}: {time_ms:.2f} ms, {arguments.batch / time_ms * 1e3:.0f} images/s, "
            f"loss {loss.item() / arguments.batch:.3f}, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        )
        categories(graph, 3, arguments.top)
        del graph, loss
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
