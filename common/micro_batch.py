"""Picks the micro-batch that fits the memory of whatever GPU is there (``micro_batch: auto``)."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from common.config import RunConfig, workload_class
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.graphs import StepRunner

USABLE = 0.80  # of the free memory: graphs, reader and allocator rounding take the rest
LARGEST = 512  # larger micro-batches gain nothing on any GPU that we know
ON_A_CPU = 32


def pick(load: Callable[[int], RunConfig], device: torch.device) -> int:
    """The largest micro-batch that divides the global batch of one replica and fits the device.

    Two small micro-batches are trained for one iteration; what they need is extended linearly. The batches of one step
    are there three times beside it: in the captured step's inputs, and in both slots of the prefetcher.

    Args:
        load: the run's configuration for a micro-batch.
        device: where it will run. A CPU gets a fixed small one.

    Raises:
        ConfigError: not even the smallest fits.
    """
    per_replica = load(1).grad_accumulation_steps
    choices = [size for size in range(1, min(per_replica, LARGEST) + 1) if per_replica % size == 0]
    if device.type != "cuda":
        return max(size for size in choices if size <= ON_A_CPU)
    small = min(choices, key=lambda size: abs(size - 8))
    larger = min(choices, key=lambda size: abs(size - 2 * small))
    used = {size: _peak_bytes(load(size), device) for size in {small, larger}}
    slope = (used[larger] - used[small]) / max(larger - small, 1)
    batches = 3 * per_replica * _sample_bytes(load(small), device)
    room = torch.cuda.mem_get_info(device)[0] * USABLE - batches
    fitting = [size for size in choices if used[small] + slope * (size - small) <= room]
    if not fitting:
        raise ConfigError(f"micro_batch=auto: {room / 2**30:.1f} GiB of free GPU memory do not fit one sample")
    return max(fitting)


def _peak_bytes(run: RunConfig, device: torch.device) -> float:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    workload = workload_class(run.benchmark.name)(run, Layout(device=device))
    runner = StepRunner(workload.build_step(), workload.model, 1, capture=False)
    runner.warm_up(workload.example_batches())
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    workload.close()
    del workload, runner
    gc.collect()
    torch.cuda.empty_cache()
    return float(peak)


def _sample_bytes(run: RunConfig, device: torch.device) -> float:
    workload = workload_class(run.benchmark.name)(run, Layout(device=device))
    example = next(iter(workload.example_batches()))
    return sum(tensor.numel() * tensor.element_size() for tensor in example.tensors.values()) / run.micro_batch
