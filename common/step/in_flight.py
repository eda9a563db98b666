"""Queue of launched iterations whose results the host has not read yet."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from common.step.train_step import DeviceResult, StepResult, TrainStep


@dataclass(frozen=True)
class Finished:
    """An iteration that the device has finished.

    Attributes:
        step: number of the iteration in the run, from 1.
        samples: nominal training samples up to and including this iteration, over all ranks.
        ended: estimated end, in seconds of the host's ``time.perf_counter``.
        step_ms: milliseconds since the previous iteration ended; 0 for the first.
        data_wait_ms: milliseconds that the host waited for the iteration's data.
    """

    step: int
    samples: int
    result: StepResult
    ended: float
    step_ms: float
    data_wait_ms: float


@dataclass
class _Pending:
    step: int
    samples: int
    data_wait_ms: float
    names: tuple[str, ...]
    host: Tensor
    done: torch.cuda.Event | None
    launched: float


class StepsInFlight:
    """A queue of launched iterations. Reading a result waits only for the oldest iteration, through a CUDA event.

    Args:
        step: the training step, which decodes its results.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._queue: deque[_Pending] = deque()
        self._free: list[Tensor] = []
        self._before: _Pending | None = None
        self._ended = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, step: int, samples: int, result: DeviceResult, data_wait_ms: float) -> None:
        """Queue an asynchronous copy of ``result`` to the host on the current stream.

        Args:
            step: number of the iteration.
            samples: training samples up to its end.
            data_wait_ms: time that this iteration waited for its data.
        """
        values = result.values
        if values.device.type == "cuda":
            fitting = [host for host in self._free if host.shape == values.shape]
            host = fitting[0] if fitting else torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._free = [other for other in self._free if other is not host]
            host.copy_(values, non_blocking=True)
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        else:
            host, done = values.clone(), None
        self._queue.append(_Pending(step, samples, data_wait_ms, result.names, host, done, time.perf_counter()))

    def pop(self) -> Finished:
        """Wait for the oldest iteration and return its result."""
        entry = self._queue.popleft()
        waited = entry.done is not None and not entry.done.query()
        if entry.done is not None:
            entry.done.synchronize()
        now = time.perf_counter()
        result = self._step.read(entry.names, entry.host.tolist())
        if entry.done is not None:
            self._free.append(entry.host)
        before, self._before = self._before, entry
        step_ms = 0.0
        if before is not None:
            if before.done is not None and entry.done is not None:
                step_ms = before.done.elapsed_time(entry.done)
            else:
                step_ms = (entry.launched - before.launched) * 1e3
        if entry.done is None:
            self._ended = entry.launched
        elif waited or before is None:
            self._ended = now
        else:  # it ended before this call: add the device's step time to the previous end
            self._ended = min(now, max(entry.launched, self._ended + step_ms / 1e3))
        return Finished(entry.step, entry.samples, result, self._ended, step_ms, entry.data_wait_ms)
