"""Copy arrays that threads have read into large buffers on the device."""

from __future__ import annotations

import threading
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

STAGING_BYTES = 1 << 24
"""Bytes of pinned memory per thread: the size of one copy to the GPU."""


class Staging:
    """Copies arrays into buffers on one device; each thread has its own stream and pinned memory.

    Args:
        device: a GPU or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # adds the index to "cuda", for the threads
        self._own = threading.local()

    def prepare_thread(self) -> None:
        """Create this thread's stream and pinned memory for :meth:`put`; use it as initializer of a thread pool."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self._own.stream = torch.cuda.Stream(self._device)
            self._own.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)

    def put(self, array: NDArray[Any], buffer: Tensor, offset: int) -> None:
        """Copy ``array`` into a flat buffer of its dtype; then every stream may read the data.

        Args:
            offset: index of the first element in ``buffer``.
        """
        given = torch.from_numpy(array.reshape(-1))
        place = buffer[offset : offset + len(given)]
        if buffer.device.type == "cpu":
            place.copy_(given)
            return
        staging = self._own.staging.view(buffer.dtype)
        with torch.cuda.stream(self._own.stream):
            for part, target in zip(given.split(len(staging)), place.split(len(staging)), strict=True):
                target.copy_(staging[: len(part)].copy_(part), non_blocking=True)
                self._own.stream.synchronize()
