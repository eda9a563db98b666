"""Arrays that threads read, brought into large buffers on the device."""

from __future__ import annotations

import threading
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

STAGING_BYTES = 1 << 24
"""What a thread brings to the GPU at a time, through pinned memory."""


class Staging:
    """Copies into buffers on one device; each thread has a stream and pinned memory of its own.

    Args:
        device: a GPU or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with an index, which threads need: "cuda" has none
        self._own = threading.local()

    def prepare_thread(self) -> None:
        """Give this thread what it needs for :meth:`put`; the initializer of a pool of threads."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self._own.stream = torch.cuda.Stream(self._device)
            self._own.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)

    def put(self, array: NDArray[Any], buffer: Tensor, offset: int) -> None:
        """Copy an array into a flat buffer, in its dtype; when this returns, every stream may read it."""
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
