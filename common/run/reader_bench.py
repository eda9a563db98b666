"""Timing of the reader of the prepared data: its speed, and how long a training step would wait for it."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from common.config.schema import BenchConfig
from common.contract.workload import Workload
from common.data.batches import Block


@dataclass(frozen=True)
class ReaderTiming:
    """Timing of the reader, over all ranks. Times are those of the slowest rank, in seconds.

    Attributes:
        first: time from opening the data until the first step's micro-batches are on the device.
        longest_warm_up: longest wait of the other steps before the measured ones.
        waited: sum of the waits of all measured steps, without the pauses between them.
        longest: longest wait of a measured step.
        samples: nominal samples of the measured steps, over all ranks.
        bytes: bytes of the measured steps' tensors on one rank.
        processor: processor seconds of all ranks and their processes in the measured steps, waiting for the GPU
            included.
    """

    first: float
    longest_warm_up: float
    waited: float
    longest: float
    samples: int
    bytes: int
    processor: float

    def rows(self, options: BenchConfig, ranks: int) -> dict[str, str]:
        """Return the output rows of ``bench``, name to text, for a measurement with ``options`` on ``ranks`` ranks."""
        rate, megabytes = self.samples / self.waited, self.bytes / self.waited / 1e6
        apart = f", {options.pause_ms:g} ms apart" if options.pause_ms else ""
        return {
            "reader": f"{self.waited / options.steps * 1e3:.3f} ms, {rate:,.0f} samples/s "
            f"({rate / ranks:,.0f} a rank), {megabytes:,.1f} MB/s of tensors a rank",
            "reader: longest wait": f"{self.longest * 1e3:.1f} ms, of {options.steps} steps{apart}",
            "reader: first step": f"{self.first * 1e3:.0f} ms with opening the data; of {options.warmup_steps} more "
            f"before the measured ones the slowest waited {self.longest_warm_up * 1e3:.1f} ms",
        }

    def report(self, options: BenchConfig, readers: int) -> dict[str, Any]:
        """Return the values for the JSON report: ``processor_seconds`` is the time of one rank per sample it reads.

        Args:
            readers: ranks that read each sample, those of one replica.
        """
        return {
            "samples_per_second": self.samples / self.waited,
            "processor_seconds": self.processor / self.samples / readers,
            "longest_wait_seconds": self.longest,
            "first_step_seconds": self.first,
            "pause_ms": options.pause_ms,
        }


def time_reader(
    workload: Workload, data_dir: Path, micro_batches: int, global_batch: int, options: BenchConfig
) -> ReaderTiming:
    """Read micro-batches and copy them to the device as training does, and time this. Collective.

    If the warm-up steps cover a whole epoch, the reader's cache is full when the measured steps begin.

    Args:
        micro_batches: micro-batches per step on one rank.
        global_batch: nominal samples per step over all ranks.

    Raises:
        DataError: the data are missing or damaged, or not those of the workload.
    """
    device, untimed = workload.layout.device, 1 + options.warmup_steps
    waits, sizes, used = [], [], 0.0
    workload.warm_up_reader()
    began = time.perf_counter()
    source = workload.open_data(data_dir)
    try:
        batches = source.batches(Block(0, 1, 0, 0, (untimed + options.steps) * global_batch))
        asked = began
        for index in range(untimed + options.steps):
            if index == untimed:
                used = -_processor_seconds()
                asked = time.perf_counter()
            step = [workload.prepare(batch) for batch in itertools.islice(batches, micro_batches)]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            waits.append(time.perf_counter() - asked)
            assert len(step) == micro_batches, "the reader ended early"
            sizes.append(sum(tensor.nbytes for batch in step for tensor in batch.tensors.values()))
            time.sleep(options.pause_ms / 1e3)
            asked = time.perf_counter()
        used += _processor_seconds()
    finally:
        source.close()
    warm_up, measured = waits[1:untimed], waits[untimed:]
    times = [waits[0], max(warm_up, default=0.0), sum(measured), max(measured)]
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    processor = torch.tensor([used], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(processor)
    first, longest_warm_up, waited, longest = slowest.tolist()
    samples = options.steps * global_batch
    return ReaderTiming(first, longest_warm_up, waited, longest, samples, sum(sizes[untimed:]), processor.item())


def _processor_seconds() -> float:
    """Return the processor time of this process, its threads and its running child processes so far, in seconds."""
    own = psutil.Process()
    times = [own.cpu_times()]
    for child in own.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times.append(child.cpu_times())
    return sum(each.user + each.system for each in times)
