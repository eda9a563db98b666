"""Measure an evaluation of 3D U-Net on one device: windows per second, and where the time goes.

``python -m benchmarks.unet3d.evaluate_bench`` evaluates 42 made-up volumes, or those of ``--data-dir``, with each of
``--batches`` windows a forward pass. All windows are of the same size, so that windows per second hold for any set.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from benchmarks.unet3d.config import Facts
from benchmarks.unet3d.evaluate import EvaluationSettings, MeanDice
from benchmarks.unet3d.model import UNet3D
from benchmarks.unet3d.ops.window_sums import ADD_WINDOW
from benchmarks.unet3d.sliding_window import SlidingWindow
from benchmarks.unet3d.volumes import Case, open_volumes
from common.contract.evaluation import Weights
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.ops.bench.stopwatch import require_gpu
from common.optim.precision import DTYPES

SHAPES = ((1.5, 1.8, 1.8), (1.2, 2.0, 2.0), (2.3, 2.2, 2.2), (1.0, 1.7, 1.7), (3.1, 1.9, 1.9), (1.6, 2.6, 2.6))
"""Of the made-up volumes, one after another, in windows."""

REST = "network, cutting windows and clearing sums"
"""What all kernels do that are not of :mod:`benchmarks.unet3d.ops.window_sums`."""


def made_up_cases(count: int, window: tuple[int, int, int]) -> list[Case]:
    """Cases of several shapes, for windows of so many voxels."""
    cases = []
    for number in range(count):
        factors = SHAPES[number % len(SHAPES)]
        depth, height, width = (round(factor * size) for factor, size in zip(factors, window, strict=True))
        cases.append(Case(f"case_{number:05d}", (depth, height, width), "eval"))
    return cases


@functools.cache
def made_up_voxels(shape: tuple[int, int, int]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Noise, and labels that don't depend on it."""
    generator = np.random.default_rng(0)
    return generator.standard_normal(shape, dtype=np.float32), generator.integers(3, size=shape, dtype=np.uint8)


def breakdown(evaluation: MeanDice, weights: Weights) -> str:
    """Device time of one evaluation by kind of kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        evaluation.predict(weights)
    sums: dict[str, float] = {}
    for event in profiler.key_averages():
        kind = next((kind for kind, pattern in ADD_WINDOW.kernel_names if re.search(pattern, event.key)), REST)
        sums[kind] = sums.get(kind, 0.0) + event.self_device_time_total / 1e3
    return ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in sorted(sums.items(), key=lambda item: -item[1]))


def measure(arguments: argparse.Namespace, batch: int) -> str:
    """One line on an evaluation with ``batch`` windows a forward pass, and on a GPU one on where its time goes."""
    facts = fixed_facts(Facts, "unet3d", **({"filters": arguments.filters} if arguments.filters else {}))
    device, dtype = torch.device(arguments.device), DTYPES[arguments.precision]
    model = UNet3D(facts, generator=torch.Generator().manual_seed(0), device=device, dtype=dtype)
    window = SlidingWindow(tuple(arguments.window or facts.input_shape), facts.overlap, facts.padding_value)
    settings = EvaluationSettings(window, batch, None, facts.dice_smooth, arguments.implementation)
    evaluation = MeanDice(model, settings, Layout(device=device), dtype, capture=True)
    weights = Weights(dict(model.named_parameters()))
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        began = time.perf_counter()
        evaluation.warm_up()
        warmed = time.perf_counter()
        if arguments.data_dir is None:
            evaluation.cache(made_up_cases(arguments.cases, window.shape), lambda case: made_up_voxels(case.shape))
        else:
            volumes = open_volumes(arguments.data_dir, window.shape)
            evaluation.cache(volumes.eval, volumes.read)
        opened = time.perf_counter()
        seconds = []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            evaluation.predict(weights)  # ends with the counts on the host
            seconds.append(time.perf_counter() - start)
        windows, median = evaluation.windows, statistics.median(seconds)
        chosen = ", ".join(f"{name} {choice}" for name, choice in {**model.chosen(), **evaluation.choices}.items())
        lines = [
            f"batch {batch}: {windows} windows in {median:.3f} s, {windows / median:.1f} windows/s",
            f"  first evaluation {seconds[0]:.3f} s, opening the data {opened - warmed:.1f} s, warm-up "
            f"{warmed - began:.1f} s; {chosen}",
        ]
        if device.type == "cuda":
            lines.append(f"  {breakdown(evaluation, weights)}")
            lines.append(f"  peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
    evaluation.close()
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Command line; ``words`` instead of its arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unet3d.evaluate_bench", description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="prepared data; made-up volumes without")
    parser.add_argument("--cases", type=int, default=42, help="made-up volumes")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 7, 8])
    parser.add_argument("--repeats", type=int, default=3, help="evaluations, of which the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--implementation", default="auto", help="of adding windows and counting classes")
    parser.add_argument(
        "--window", type=int, nargs=3, help="another size of the windows than the rules', for small tries"
    )
    parser.add_argument("--filters", type=int, nargs=5, help="other widths of the network than the rules'")
    arguments = parser.parse_args(words)
    if arguments.device != "cpu":
        require_gpu("benchmarks.unet3d.evaluate_bench", "--device cpu measures a CPU")
    torch.backends.cudnn.benchmark = True
    for batch in arguments.batches:
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print(measure(arguments, batch), flush=True)


if __name__ == "__main__":
    main()
