"""Load the next step's batches to the device while the current step computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from common.data.batches import Batch, HostBatch


class Prefetcher:
    """Groups a reader's micro-batches into steps, and prepares them one step ahead on a side stream.

    Batches of two steps exist at a time: the step that the compute stream uses, and the step that the side stream
    fills. The side stream refills a slot only after the step that used it has finished, which may belong to the
    previous block.

    Args:
        prepare: completes a micro-batch on the device; runs on the side stream.
        micro_batches: micro-batches per step.
        stream: the side stream of the run; None without a GPU.

    Attributes:
        wait_seconds: total time that the host waited for the reader; the caller may reset it.
    """

    def __init__(
        self,
        prepare: Callable[[HostBatch], Batch],
        micro_batches: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._batches: Iterator[HostBatch] = iter(())
        self._prepare = prepare
        self._count = micro_batches
        self._stream = stream
        self._ready: torch.cuda.Event | None = None
        self._consumed: list[torch.cuda.Event | None] = [None, None]
        self._slots: list[list[Batch]] = [[], []]
        self._turn = 0
        self.wait_seconds = 0.0
        self._next: list[Batch] | None = None

    def begin(self, batches: Iterator[HostBatch]) -> None:
        """Set ``batches``, the reader's micro-batches of the next block, and fetch those of its first step."""
        if self._stream is not None and self._ready is None:
            # The first batches may be computed from tensors that the current stream still writes.
            self._stream.wait_stream(torch.cuda.current_stream())
        self._batches = batches
        self._next = self._fetch()

    def take(self) -> list[Batch] | None:
        """Return the batches of the next step, or None at the end of the block.

        On a GPU, the current stream waits for them. Call :meth:`consumed` after the work that uses them was queued.
        """
        if self._next is None:
            return None
        if self._stream is not None and self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
        return self._next

    def consumed(self) -> None:
        """Fetch the next batches. The step that uses the taken ones must be queued on the current stream already."""
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record()
            self._consumed[self._turn] = event
        self._turn ^= 1
        self._next = self._fetch()

    def _fetch(self) -> list[Batch] | None:
        if self._stream is None:
            return self._gather()
        freed = self._consumed[self._turn]
        if freed is not None:
            self._stream.wait_event(freed)
        with torch.cuda.stream(self._stream):
            self._slots[self._turn] = []
            batches = self._gather()
            if batches is not None:
                self._slots[self._turn] = batches
            self._ready = torch.cuda.Event()
            self._ready.record()
        return batches

    def _gather(self) -> list[Batch] | None:
        gathered: list[Batch] = []
        for _ in range(self._count):
            began = time.perf_counter()
            host = next(self._batches, None)
            self.wait_seconds += time.perf_counter() - began
            if host is None:
                break
            gathered.append(self._prepare(host))
        return gathered or None


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for prefetching, or None without a GPU. Use one for a whole run: memory is cached per stream."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
