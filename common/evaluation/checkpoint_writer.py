"""Asynchronous writer of weights to disk, while training continues.

The training stream copies the weights to a snapshot on the device; training waits for nothing else. A side stream
copies the snapshot to one of a fixed number of pinned host buffers, and a thread writes the buffer to disk. The host
waits only if all buffers are in use: with two, only if a write takes longer than training between two evaluation
points.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.distributed.weights import Template
from common.errors import CheckpointError
from common.formats.safetensors_file import write_tensors


@dataclass(frozen=True)
class _Order:
    """A host buffer to write to ``path``, once the event ``copied`` is complete."""

    path: Path
    host: Tensor
    copied: torch.cuda.Event | None


class CheckpointWriter:
    """Writes weights with the layout of one template.

    Attributes:
        waited_seconds: total time that :meth:`write` waited for a free host buffer.
    """

    def __init__(self, folder: Path, template: Template, device: torch.device, buffers: int) -> None:
        self._folder, self._template = folder, template
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        # Without a GPU the weights are copied directly into a host buffer.
        self._snapshot = torch.zeros(template.bytes, dtype=torch.uint8, device=device) if cuda else None
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put(torch.zeros(template.bytes, dtype=torch.uint8, pin_memory=cuda))
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._error: CheckpointError | None = None
        self.waited_seconds = 0.0
        self._submitted = self._collected = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkpoints to the disk", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Write ``weights``. They may change as soon as the current stream has passed this call.

        Raises:
            CheckpointError: an earlier checkpoint could not be written.
            RuntimeError: the writing thread ended unexpectedly.
        """
        self.check()
        host = self._free_copy()
        copied = None
        into = host if self._snapshot is None else self._snapshot
        if self._stream is not None:  # the previous copy to the host must be finished
            torch.cuda.current_stream().wait_stream(self._stream)
        views = self._template.views(into)
        torch._foreach_copy_(list(views.values()), [weights[name] for name in views])
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                host.copy_(into, non_blocking=True)
                copied = torch.cuda.Event(blocking=True)
                copied.record()
        self._submitted += 1
        self._orders.put(_Order(self._folder / f".weights_{self._submitted}.partial", host, copied))

    def check(self) -> None:
        """Raise the error of the writing thread: CheckpointError, or RuntimeError if the thread ended unexpectedly."""
        if self._error is not None:
            raise self._error
        if not self._closed and not self._thread.is_alive():
            raise RuntimeError("the thread that writes checkpoints has ended: its own message says why")

    def collect(self, wait: bool = False) -> list[Path]:
        """Return the newly completed files, in the order of submission.

        Args:
            wait: whether to wait until all submitted files are complete.

        Raises:
            CheckpointError: a file could not be written.
            RuntimeError: the writing thread ended unexpectedly.
        """
        self.check()
        found: list[Path] = []
        while self._collected < self._submitted and (wait or not self._written.empty()):
            try:
                found.append(self._written.get(timeout=0.2))
                self._collected += 1
            except queue.Empty:
                self.check()
        return found

    def close(self) -> None:
        """Write everything that has been submitted, unless writing has failed, and end the thread."""
        self._closed = True
        self._orders.put(None)
        self._thread.join()

    def _free_copy(self) -> Tensor:
        began = time.perf_counter()
        while True:
            try:
                host = self._free.get(timeout=0.2)
                break
            except queue.Empty:
                self.check()
        self.waited_seconds += time.perf_counter() - began
        return host

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if order.copied is not None:
                order.copied.synchronize()
            try:
                write_tensors(order.path, self._template.views(order.host), {"format": "pt"})
            except OSError as error:
                order.path.unlink(missing_ok=True)
                self._error = CheckpointError(f"a checkpoint was not written to {self._folder}: {error.strerror}")
                return
            self._free.put(order.host)
            self._written.put(order.path)
