"""GPU kernels of an iteration as the profiler sees them: what they took by kind, and what communication cost."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from common.ops.catalogue import all_operations
from common.run.exposed import Span, busy_us, exposed_us

Result = TypeVar("Result")

LONGEST = 16
"""Kernels that a breakdown names."""

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
    ("optimizer", r"measure_kernel|trust_ratio|update_kernel|adaptive_|multi_tensor|scale_kernel"),
    ("copy and fill", r"memcpy|memset|copy|fill|convert|nchw|nhwc"),
)
"""Kind of work -> pattern of the names of kernels of PyTorch, libraries and optimizers; the first match counts, behind
those of the operations. cuDNN's attention is a ``flash_fprop`` too. A copy to or from another GPU's memory is
communication (``Memcpy PtoP``), one within a GPU's own is not (``Memcpy DtoD``)."""


ANNOTATION = "ProfilerStep"
"""What the profiler's own marks of a step are called, which lie over the kernels."""


class Kernel(NamedTuple):
    """A kernel, or a copy, that ran.

    Attributes:
        name: of the kernel.
        start, end: microseconds of the profiler's clock.
    """

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Breakdown:
    """Device time of an iteration, milliseconds.

    Attributes:
        kinds: of kernels, by kind of work; what ran at once is counted twice.
        kernels: of each kernel, and how often it ran.
        exposed_ms: of communication that nothing else ran beside.
        busy_ms: in which anything ran.
        communication_ms: in which communication ran, from the moment at which its kernels wait for other ranks on.
    """

    kinds: dict[str, float]
    kernels: dict[str, tuple[float, int]]
    exposed_ms: float
    busy_ms: float
    communication_ms: float = 0.0

    @property
    def compute_ms(self) -> float:
        """In which anything but communication ran."""
        return self.busy_ms - self.exposed_ms

    def rows(self, **others: float) -> list[str]:
        """Kinds and ``others``, the longest first, and the longest kernels."""
        kinds = sorted({**self.kinds, **others}.items(), key=lambda item: -item[1])
        rows = [f"  {kind:<34}{ms:9.3f} ms" for kind, ms in kinds]
        if self.kinds.get(COMMUNICATION):
            rows.insert(0, f"  {'communication beside nothing':<34}{self.exposed_ms:9.3f} ms")
        longest = sorted(self.kernels.items(), key=lambda item: -item[1][0])[:LONGEST]
        return [*rows, "  longest kernels", *(f"    {ms:8.3f} ms in {n:3d}  {name[:110]}" for name, (ms, n) in longest)]


def meet(cuda: bool) -> None:
    """Wait for the device, and for the other ranks. Collective."""
    if dist.is_initialized():
        dist.barrier()
    if cuda:
        torch.cuda.synchronize()


def recorded(before: Callable[[], object], work: Callable[[], Result]) -> tuple[list[Kernel], Result]:
    """Kernels that ``work`` launches on the GPU, and what it returns. Collective.

    The profiler takes some tens of milliseconds to start, on every rank as many others, and the ranks' meeting is a
    kernel itself: ``before`` runs while it starts, then the ranks meet, and only what follows is recorded.

    Args:
        before: one iteration, or a part of one.
        work: waits for the device in the end, or lets others do so.
    """
    cycle = schedule(wait=0, warmup=1, active=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=cycle, acc_events=True) as profiler:
        before()
        meet(cuda=True)
        profiler.step()
        result = work()
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(ANNOTATION)
    ]
    return kernels, result


def breakdown(kernels: Iterable[Kernel], parts: int) -> Breakdown:
    """What ``kernels`` took, as parts of ``parts`` iterations or micro-batches."""
    kinds: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    spans = []
    for kernel in kernels:
        kind, spent = kind_of(kernel.name), (kernel.end - kernel.start) / 1e3
        kinds[kind] = kinds.get(kind, 0.0) + spent / parts
        times.setdefault(kernel.name, []).append(spent)
        spans.append(Span(kernel.start, kernel.end, kind == COMMUNICATION))
    each = {name: (sum(spent) / parts, len(spent) // parts) for name, spent in times.items()}
    of_communication = [span for span in spans if span.communication]
    exposed, busy, communication = (
        us / 1e3 / parts for us in (exposed_us(spans), busy_us(spans), busy_us(of_communication))
    )
    return Breakdown(kinds, each, exposed, busy, communication)


def kind_of(kernel: str) -> str:
    """The kind of work that a kernel of this name does: by the names of the operations, then by :data:`CATEGORIES`."""
    return next((kind for kind, pattern in _patterns() if re.search(pattern, kernel, re.IGNORECASE)), "other")


@functools.cache
def _patterns() -> tuple[tuple[str, str], ...]:
    return (*(pair for operation in all_operations().values() for pair in operation.kernel_names), *CATEGORIES)
