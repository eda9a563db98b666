"""GPU kernels of an iteration, recorded by the profiler: time by kind of work, and cost of communication.

Communication is exposed while no other kernel runs.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from common.ops.catalogue import all_operations

Result = TypeVar("Result")

LONGEST = 16
"""Number of kernels that a breakdown lists."""

COMMUNICATION = "communication"

CATEGORIES = (
    (COMMUNICATION, r"nccl|all_reduce|reduce_scatter|all_gather|barrier_kernel|memcpy ptop"),
    ("copy from or to the host", r"memcpy (htod|dtoh)"),
    ("attention", r"attention|flash|fmha"),
    ("convolution forward", r"fprop|conv2d_forward"),
    ("convolution backward", r"dgrad|wgrad"),
    ("convolution, either way", r"convolve"),
    ("dropout and layer norm", r"dropout|layer_?norm"),
    ("GELU", r"gelu"),
    ("cross-entropy", r"nll_loss|softmax"),
    ("embedding", r"embedding|index(?!ed)"),
    ("batch or instance norm", r"batch_?norm|bn_"),
    ("pooling", r"pool"),
    ("matrix product", r"gemm|nvjet|cutlass|xmma|splitk"),
    ("optimizer", r"measure_kernel|adaptive_|multi_tensor|scale_kernel|add_pieces"),
    ("copy and fill", r"memcpy|memset|copy|fill|convert|nchw|nhwc"),
)
"""Kind of work -> regular expression for names of kernels of PyTorch, libraries and optimizers. The first match counts;
the operations' own names are tried before. cuDNN's attention kernels also contain ``fprop`` (``flash_fprop``). A copy
between two GPUs is communication (``Memcpy PtoP``), a copy within one GPU is not (``Memcpy DtoD``)."""


ANNOTATION = "ProfilerStep"
"""Prefix of the profiler's own step markers, which overlap the kernels and are ignored."""


class KernelSpan(NamedTuple):
    """One execution of a kernel or copy, with start and end in microseconds of the profiler's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Breakdown:
    """Device time of an iteration, in milliseconds.

    Attributes:
        kinds: kind of work to summed kernel time; concurrent kernels each count in full.
        kernels: kernel name to its time and number of executions.
        exposed_ms: time in which only communication ran.
        busy_ms: time in which any kernel ran.
        communication_ms: time in which communication kernels ran, including their wait for other ranks.
    """

    kinds: dict[str, float]
    kernels: dict[str, tuple[float, int]]
    exposed_ms: float
    busy_ms: float
    communication_ms: float = 0.0

    @property
    def compute_ms(self) -> float:
        """Time in which any kernel except communication ran."""
        return self.busy_ms - self.exposed_ms

    def rows(self, **others: float) -> list[str]:
        """Return text lines for kinds and ``others``, longest first, and for the longest kernels."""
        kinds = sorted({**self.kinds, **others}.items(), key=lambda item: -item[1])
        rows = [f"  {kind:<34}{ms:9.3f} ms" for kind, ms in kinds]
        if self.kinds.get(COMMUNICATION):
            rows.insert(0, f"  {'communication beside nothing':<34}{self.exposed_ms:9.3f} ms")
        longest = sorted(self.kernels.items(), key=lambda item: -item[1][0])[:LONGEST]
        return [*rows, "  longest kernels", *(f"    {ms:8.3f} ms in {n:3d}  {name[:110]}" for name, (ms, n) in longest)]


def meet(cuda: bool) -> None:
    """Wait for the other ranks, then for this rank's GPU if ``cuda``. Collective."""
    if dist.is_initialized():
        dist.barrier()
    if cuda:
        torch.cuda.synchronize()


def recorded(before: Callable[[], object], work: Callable[[], Result]) -> tuple[list[KernelSpan], Result]:
    """Record the GPU kernels of ``work``; return them and the result of ``work``. Collective.

    The profiler takes tens of milliseconds to start, a different time on each rank, and the barrier is a kernel itself.
    Therefore ``before``, such as one iteration, runs while the profiler starts, then the ranks meet, and only later
    kernels are recorded.
    """
    cycle = schedule(wait=0, warmup=1, active=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=cycle, acc_events=True) as profiler:
        before()
        meet(cuda=True)
        profiler.step()
        result = work()
        torch.cuda.synchronize()
    kernels = [
        KernelSpan(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(ANNOTATION)
    ]
    return kernels, result


def breakdown(kernels: Iterable[KernelSpan], parts: int) -> Breakdown:
    """Return the device time of ``kernels`` per iteration, for ``parts`` iterations or micro-batches."""
    kinds: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    communication, others = list[KernelSpan](), list[KernelSpan]()
    for kernel in kernels:
        kind, spent = kind_of(kernel.name), (kernel.end - kernel.start) / 1e3
        kinds[kind] = kinds.get(kind, 0.0) + spent / parts
        times.setdefault(kernel.name, []).append(spent)
        (communication if kind == COMMUNICATION else others).append(kernel)
    each = {name: (sum(spent) / parts, len(spent) // parts) for name, spent in times.items()}
    busy = busy_us([*communication, *others])
    exposed = busy - busy_us(others)
    exposed_ms, busy_ms, communication_ms = (us / 1e3 / parts for us in (exposed, busy, busy_us(communication)))
    return Breakdown(kinds, each, exposed_ms, busy_ms, communication_ms)


def kind_of(kernel: str) -> str:
    """Return the kind of work of a kernel: by the kernel names of the operations, then by :data:`CATEGORIES`."""
    return next((kind for kind, pattern in _patterns() if re.search(pattern, kernel, re.IGNORECASE)), "other")


@functools.cache
def _patterns() -> tuple[tuple[str, str], ...]:
    return (*(pair for operation in all_operations().values() for pair in operation.kernel_names), *CATEGORIES)


def busy_us(kernels: Iterable[KernelSpan]) -> float:
    """Return the microseconds in which any of ``kernels`` ran."""
    intervals: list[tuple[float, float]] = []  # disjoint, in order
    for start, end in sorted((kernel.start, kernel.end) for kernel in kernels):
        if intervals and start <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(intervals[-1][1], end)
        else:
            intervals.append((start, end))
    return sum(end - start for start, end in intervals)


def timed(work: Callable[[], object], cuda: bool) -> float:
    """Return the seconds of ``work``, which all ranks begin together. Collective."""
    meet(cuda)
    return elapsed(work, cuda)


def elapsed(work: Callable[[], object], cuda: bool) -> float:
    """Return the seconds of ``work``, on the GPU if ``cuda``."""
    if cuda:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
