"""Cache of the volumes of one rank in memory, filled by threads in the order in which training needs the volumes.

Images and labels are in two flat buffers, at the same offsets: on the GPU if they fit, otherwise in host memory.
Training starts with the first volumes, and waits only for a volume, or the boxes of its objects, that is not ready.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.unet3d.config import CacheLocation
from benchmarks.unet3d.crop import Boxes, largest_boxes
from benchmarks.unet3d.volumes import Volumes
from common.errors import ConfigError

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


ALIGNMENT = 64
"""Alignment of volumes in the buffers, in voxels."""


class VolumeCache:
    """Volumes of a prepared folder in memory.

    Args:
        cases: indices of the training cases that may be used.
        device: device of the buffers, a GPU or the CPU.
        threads: threads that read volumes.

    Attributes:
        images: (voxels,) fp32.
        labels: (voxels,) uint8.
    """

    def __init__(self, volumes: Volumes, cases: Sequence[int], device: torch.device, threads: int) -> None:
        self._volumes = volumes
        self._offsets: dict[int, int] = {}
        end = 0
        for case in cases:
            self._offsets[case] = end
            end += _aligned(volumes.train[case].voxels)
        self.images = torch.empty(end, dtype=torch.float32, device=device)
        self.labels = torch.empty(end, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # reused memory may still be in use on another stream
        self._staging = Staging(device)
        self._read: dict[int, Future[None]] = {}
        self._boxes: dict[int, Future[Boxes]] = {}
        self._unboxed: dict[int, NDArray[np.uint8]] = {}
        self._readers = ThreadPoolExecutor(threads, "volumes", self._staging.prepare_thread)
        self._boxing = ThreadPoolExecutor(1, "boxes")  # one thread, because the search holds the GIL

    def start(self, order: Sequence[int]) -> None:
        """Start to read the volumes that are not in memory yet, in this order; does not wait."""
        for case in order:
            if case not in self._read:
                self._read[case] = self._readers.submit(self._bring, case)
                self._boxes[case] = self._boxing.submit(self._find_boxes, case)

    def wait(self, case: int) -> int:
        """Wait until a volume is in memory; return the offset of its first voxel in the buffers.

        Raises:
            DataError: the volume cannot be read.
        """
        self._read[case].result()
        return self._offsets[case]

    def boxes(self, case: int) -> Boxes:
        """Wait for the objects of a volume and return their boxes. Raises as :meth:`wait`."""
        return self._boxes[case].result()

    def close(self) -> None:
        """Stop the threads after their current volumes, and free the memory."""
        self._readers.shutdown(cancel_futures=True)
        self._boxing.shutdown(cancel_futures=True)
        self.images, self.labels = self.images.new_empty(0), self.labels.new_empty(0)

    def _bring(self, case: int) -> None:
        image, label = self._volumes.read(self._volumes.train[case])
        self._staging.put(image, self.images, self._offsets[case])
        self._staging.put(label, self.labels, self._offsets[case])
        self._unboxed[case] = label

    def _find_boxes(self, case: int) -> Boxes:
        self._read[case].result()
        return largest_boxes(self._unboxed.pop(case))


def bytes_needed(volumes: Volumes, cases: Sequence[int]) -> int:
    """Return the size in bytes of a cache of these cases."""
    return sum(_aligned(volumes.train[case].voxels) for case in cases) * (torch.float32.itemsize + 1)


def choose_location(requested: CacheLocation, needed: int, device: torch.device) -> CacheLocation:
    """Return the location of the cache: ``device`` or ``host``.

    Args:
        requested: ``auto`` chooses the device if the volumes fit into half of its free memory.
        needed: size of the volumes in bytes.
        device: training device. If it is the CPU, both locations are host memory.

    Raises:
        ConfigError: the volumes do not fit into the free memory.
    """
    host_free = psutil.virtual_memory().available
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_free
    location = requested
    if requested == "auto":
        location = "device" if device.type != "cuda" or needed <= free / 2 else "host"
    available = free if location == "device" else host_free
    if needed > available:
        otherwise = ", or reader.cache=host" if location == "device" and device.type == "cuda" else ""
        raise ConfigError(
            f"reader.cache={location}: the volumes of this rank take {needed / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB are free; use more reader.shares{otherwise}"
        )
    return location


def _aligned(voxels: int) -> int:
    return -(-voxels // ALIGNMENT) * ALIGNMENT
