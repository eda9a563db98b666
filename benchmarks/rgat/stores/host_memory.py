"""Host memory that all ranks of a node map, and that their GPUs read in place.

The memory is anonymous and shared through file descriptors. No file becomes visible, a killed rank leaves none
behind, and the container's limit for /dev/shm does not apply.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import one_machine
from common.errors import DeviceError

PORTABLE, MAPPED = 1, 2
"""Flags of cudaHostRegister: pinned for every context of this process, and mapped into its GPUs' address space."""


class NodeMemory:
    """One buffer per rank of a node. Construction is collective; each rank fills its own, then calls :meth:`share`.

    Args:
        size: bytes of each rank's buffer.
        group: ranks of the node; None for a single rank.
        device: device of this rank.

    Attributes:
        own: uint8, [size]: this rank's buffer.
        buffers: buffers of all ranks, in the order of the group. Only read those of other ranks.

    Raises:
        DeviceError: the ranks cannot map each other's memory; raised on all ranks.
    """

    def __init__(self, size: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._registered: list[Tensor] = []
        descriptor = os.memfd_create("features", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            if group is None:
                self.buffers: tuple[Tensor, ...] = (_mapped(descriptor, size),)
                self.own = self.buffers[0]
            else:
                self.buffers = self._mapped_by_all(descriptor, size, group)
                self.own = self.buffers[group.rank()]
        finally:
            os.close(descriptor)

    def share(self) -> None:
        """Wait until all ranks have filled their buffers; on a GPU, pin all buffers.

        Pages are pinned only now, because the rank that first writes a page places it next to its own processor.

        Raises:
            DeviceError: the memory cannot be pinned.
        """
        if self._group is not None:
            one_machine.gathered(0, self._group, self._device)
        if self._device.type != "cuda":
            return
        for buffer in self.buffers:
            address, size = buffer.data_ptr(), buffer.numel()
            try:
                torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE | MAPPED)))
            except RuntimeError as error:
                self.close()
                raise DeviceError(f"{size:,} bytes of host memory cannot be pinned for features: {error}") from error
            self._registered.append(buffer)

    def close(self) -> None:
        """Unpin all buffers; the memory itself lives as long as its tensors."""
        while self._registered:
            address = self._registered.pop().data_ptr()
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))

    def _mapped_by_all(self, descriptor: int, size: int, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        said = (os.getpid(), descriptor, os.fstat(descriptor).st_ino)
        processes, descriptors, files = (one_machine.gathered(number, group, self._device) for number in said)
        found, reason = [], "another rank of the node cannot map the memory of its neighbours"
        try:
            for rank, (process, number, file) in enumerate(zip(processes, descriptors, files, strict=True)):
                found.append(_of_process(process, number, file, size) if rank != group.rank() else None)
        except OSError as error:
            reason = f"the memory of another rank of the node cannot be mapped: {error}; do they run in one container?"
        mapped = len(found) == len(processes)
        if not all(one_machine.gathered(int(mapped), group, self._device)):
            raise DeviceError(reason)
        return tuple(_mapped(descriptor, size) if buffer is None else buffer for buffer in found)


def _of_process(process: int, descriptor: int, file: int, size: int) -> Tensor:
    """Map another process's descriptor, after a check that it is the expected file."""
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_ino != file:
            raise OSError(f"process {process} is another one here")
        return _mapped(opened, size)
    finally:
        os.close(opened)


def _mapped(descriptor: int, size: int) -> Tensor:
    memory = mmap.mmap(descriptor, size)
    with contextlib.suppress(OSError):  # the system may have no large pages for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size)
