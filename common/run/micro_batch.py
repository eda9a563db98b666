"""Picks the largest micro-batch that fits the GPU's memory (``micro_batch: auto``)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence

import torch

from common.config.schema import RunConfig
from common.contract.workload import Workload
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.step.graphs import StepRunner

USABLE = 0.80  # fraction of the free memory; graphs, reader and allocator rounding need the rest
ON_A_CPU = 32
PROBED = 8


def pick(workload_type: type[Workload], load: Callable[[int], RunConfig], device: torch.device) -> int:
    """Return the largest permitted micro-batch that divides the global batch of one replica and fits the device.

    Permitted are multiples of ``micro_batch_multiple`` up to ``largest_micro_batch``
    (:class:`common.config.schema.Declaration`). The peak memory of the step is measured with two small micro-batches
    and extrapolated linearly.

    Args:
        load: returns the run's configuration for a micro-batch.
        device: device of the run. On a CPU nothing is measured: the result is at most 32, if a permitted size is.

    Raises:
        ConfigError: no permitted size divides the global batch, or not even the smallest fits.
    """
    smallest = load(1)
    per_replica, unit = smallest.grad_accumulation_steps, smallest.declaration.micro_batch_multiple
    most = min(per_replica, smallest.declaration.largest_micro_batch)
    choices = [size for size in range(unit, most + 1, unit) if per_replica % size == 0]
    if not choices:
        raise ConfigError(f"micro_batch=auto: no multiple of {unit} divides the {per_replica} samples of a replica")
    if device.type != "cuda":
        return max([size for size in choices if size <= ON_A_CPU] or choices[:1])
    # Each step's batches exist three times: in the graph's static inputs and in both slots of the prefetcher.
    batches = 3 * per_replica * _sample_bytes(workload_type.probe(load(choices[0]), Layout(device=device)))
    capacity = torch.cuda.mem_get_info(device)[0] * USABLE - batches - workload_type.unprobed_bytes(smallest)
    fitting = largest_fitting(choices, lambda size: _peak_bytes(workload_type, load(size), device), capacity)
    if fitting is None:
        raise ConfigError(
            f"micro_batch=auto: {capacity / 2**30:.1f} GiB of free GPU memory do not fit {choices[0]} samples"
        )
    return fitting


def largest_fitting(choices: Sequence[int], peak_bytes: Callable[[int], float | None], capacity: float) -> int | None:
    """Return the largest of ``choices`` that needs at most ``capacity`` bytes; None if none does.

    Args:
        choices: micro-batch sizes, ascending.
        peak_bytes: returns the measured bytes for a choice; None if it runs out of memory.
    """
    probed = PROBED
    while True:
        small = min(choices, key=lambda size: abs(size - probed))
        used = peak_bytes(small)
        if used is not None:
            break
        if small == choices[0]:
            return None
        probed = min(probed, small) // 2
    larger = min(choices, key=lambda size: abs(size - 2 * small))
    more = used if larger == small else peak_bytes(larger)
    if more is None:
        return small if used <= capacity else None
    slope = (more - used) / max(larger - small, 1)
    return max((size for size in choices if used + slope * (size - small) <= capacity), default=None)


def _peak_bytes(workload_type: type[Workload], run: RunConfig, device: torch.device) -> float | None:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    peak: float | None = None
    with contextlib.suppress(torch.OutOfMemoryError):
        _train_once(workload_type.probe(run, Layout(device=device)))
        peak = float(torch.cuda.max_memory_allocated(device) - before)
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _train_once(workload: Workload) -> None:
    runner = StepRunner(workload.build_step(), workload.model, 1, capture=False)
    runner.warm_up(workload.example_batches())
    torch.cuda.synchronize(workload.layout.device)
    workload.close()


def _sample_bytes(workload: Workload) -> float:
    example = next(iter(workload.example_batches()))
    return sum(tensor.numel() * tensor.element_size() for tensor in example.tensors.values()) / workload.cfg.micro_batch
