"""Host memory that reads past the page cache fill: aligned, reused, and pinned where there is a GPU.

The memory is mapped here and then registered with CUDA, since what CUDA allocates itself need not be memory that the
kernel reads into directly.
"""

from __future__ import annotations

import mmap
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from common.errors import DeviceError

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Address, offset and length of a direct read, in bytes, are multiples of it: a block of a disk, a page of a client."""


class Awaited(Protocol):
    """What has an end that can be waited for, such as a ``torch.cuda.Event``."""

    def synchronize(self) -> object:
        """Wait for it."""
        ...


class AlignedBuffer:
    """One of the buffers.

    Args:
        memory: aligned.
        offset, size: the part of it, in bytes.

    Attributes:
        values: uint8, [size].
        blocks: the same bytes, for the operating system.
    """

    def __init__(self, memory: mmap.mmap, offset: int, size: int) -> None:
        self.values = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
        self.blocks = memoryview(memory)[offset : offset + size]
        self._used_until: Awaited | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.blocks)

    def keep_until(self, event: Awaited) -> None:
        """Let :meth:`wait` wait for ``event``: until then something reads the buffer that the host doesn't see."""
        self._used_until = event

    def wait(self) -> None:
        """Wait until the buffer may be filled."""
        if self._used_until is not None:
            self._used_until.synchronize()
            self._used_until = None


class AlignedBuffers:
    """Buffers of one size; a context manager.

    The memory itself lives as long as a tensor of it; :meth:`close` ends its registration with CUDA.

    Args:
        count: buffers.
        size: bytes of each, a multiple of :data:`ALIGNMENT`.
        pin_memory: for copies to a GPU that nobody waits for; None: where this process sees a GPU. Then the current
            device must be this rank's, as a CUDA context is made on it.

    Raises:
        ValueError: no buffer, or a size that is not aligned.
        DeviceError: the memory cannot be pinned.

    Attributes:
        size: bytes of each.
        pinned: whether they are pinned now.
    """

    def __init__(self, count: int, size: int, pin_memory: bool | None = None) -> None:
        if count < 1 or size < ALIGNMENT or size % ALIGNMENT:
            raise ValueError(f"{count} buffers of {size} bytes: at least 1, of a multiple of {ALIGNMENT} bytes")
        self.size = size
        self.pinned = torch.cuda.is_available() if pin_memory is None else pin_memory
        if self.pinned and not torch.cuda.is_available():
            raise DeviceError("host memory is to be pinned for reading files, and this process sees no GPU")
        # Shared with forked processes, or a fork could move pages away from under a read that is on its way.
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
        """Wait for all that uses the buffers, and unpin them. What was read stays in the tensors that are held."""
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
