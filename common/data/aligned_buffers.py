"""Aligned, reusable host buffers for direct reads (O_DIRECT), pinned if the process sees a GPU."""

from __future__ import annotations

import mmap
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from common.errors import DeviceError

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Alignment in bytes of address, offset and length of a direct read: at least a disk block and a memory page."""


def aligned(size: int) -> int:
    """Return ``size`` bytes rounded up to :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Awaited(Protocol):
    """An event that the host can wait for, such as a ``torch.cuda.Event``."""

    def synchronize(self) -> object:
        """Block until the event has happened."""
        ...


class AlignedBuffer:
    """One buffer of :class:`AlignedBuffers`.

    Args:
        memory: aligned memory mapping that contains the buffer.
        offset, size: position and length of the buffer in ``memory``, in bytes.

    Attributes:
        values: the buffer as uint8, [size].
        blocks: views of the same bytes, which system calls fill.
    """

    def __init__(self, memory: mmap.mmap, offset: int, size: int) -> None:
        self.values = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
        self.blocks = memoryview(memory)[offset : offset + size]
        self._used_until: Awaited | None = None

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.blocks)

    def keep_until(self, event: Awaited) -> None:
        """Make :meth:`wait` wait for ``event``, because an asynchronous operation reads the buffer until then."""
        self._used_until = event

    def wait(self) -> None:
        """Wait until the buffer may be overwritten."""
        if self._used_until is not None:
            self._used_until.synchronize()
            self._used_until = None


class AlignedBuffers:
    """Several buffers of the same size; a context manager.

    The memory lives as long as any tensor that uses it. :meth:`close` ends only its registration with CUDA.

    Args:
        size: bytes of each buffer, a multiple of :data:`ALIGNMENT`.
        pin_memory: whether to pin the memory, for asynchronous copies to a GPU; None: if this process sees a GPU.
            Pinning creates a CUDA context, so the current device must be the device of this rank.

    Raises:
        ValueError: ``count`` is 0, or ``size`` is not aligned.
        DeviceError: the memory cannot be pinned.

    Attributes:
        pinned: whether the memory is pinned now.
    """

    def __init__(self, count: int, size: int, pin_memory: bool | None = None) -> None:
        if count < 1 or size < ALIGNMENT or size % ALIGNMENT:
            raise ValueError(f"{count} buffers of {size} bytes: at least 1, of a multiple of {ALIGNMENT} bytes")
        self.size = size
        self.pinned = torch.cuda.is_available() if pin_memory is None else pin_memory
        if self.pinned and not torch.cuda.is_available():
            raise DeviceError("host memory is to be pinned for reading files, and this process sees no GPU")
        # Mapped here and registered with CUDA below, because direct reads into memory that CUDA allocates may fail.
        # Shared, because after a fork, copy-on-write could move private pages while a read is in progress.
        memory = mmap.mmap(-1, count * size)
        self._buffers = [AlignedBuffer(memory, index * size, size) for index in range(count)]
        if self.pinned:
            self._register(count * size)

    def __len__(self) -> int:
        return len(self._buffers)

    def __getitem__(self, index: int) -> AlignedBuffer:
        return self._buffers[index]

    def __enter__(self) -> AlignedBuffers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait until no operation uses the buffers, then unpin them. Tensors that use the memory stay valid."""
        for buffer in self._buffers:
            buffer.wait()
        if self.pinned:
            self.pinned = False
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self._first.data_ptr())))

    @property
    def _first(self) -> Tensor:
        return self._buffers[0].values

    def _register(self, size: int) -> None:
        portable = 1  # cudaHostRegisterPortable: pinned for every context of this process
        try:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self._first.data_ptr(), size, portable)))
        except RuntimeError as error:
            raise DeviceError(f"{size:,} bytes of host memory cannot be pinned for reading files: {error}") from error
