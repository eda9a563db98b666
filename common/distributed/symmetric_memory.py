"""Symmetric memory: buffers that all ranks of one machine map from each other, for direct reads and writes.

Allocate buffers before graph capture. They stay mapped as long as :class:`PeerMemory` lives, so users of views must
keep a reference to it. Signals and barriers run on the device, so hosts do not synchronise.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symmetric_memory
from torch import Tensor

T = TypeVar("T")

MACHINE_VARIABLE = "NCCL_HOSTID"
"""Environment variable that names the machine of a rank. NCCL compares it, too, in place of the machine's own name."""


class Handle(Protocol):
    """Members of ``torch._C._distributed_c10d._SymmetricMemory`` that we use.

    Signals and barriers are enqueued on the current stream.
    """

    buffer_ptrs: list[int]

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype, storage_offset: int) -> Tensor:
        """Return a part of another rank's buffer; the offset counts elements of ``dtype``."""
        ...

    def put_signal(self, dst_rank: int, channel: int) -> None:
        """Set a signal at another rank, after this rank's previous signal there on ``channel`` is cleared."""
        ...

    def wait_signal(self, src_rank: int, channel: int) -> None:
        """Wait for a signal from another rank on ``channel``, and clear it."""
        ...

    def barrier(self, channel: int) -> None:
        """Wait until all ranks have reached the barrier of ``channel``."""
        ...


class PeerMemory:
    """Buffers of equal size, one on each rank of a group, that all ranks map. :meth:`allocate` creates an object.

    Args:
        own: buffer of this rank, uint8.
        handle: handle of the buffers, with all signals cleared.
        rank, ranks: rank of this process in the group, and size of the group.
    """

    def __init__(self, own: Tensor, handle: Handle, rank: int, ranks: int) -> None:
        self.size = own.numel()
        self.rank, self.ranks = rank, ranks
        self._own: Tensor | None = own  # PyTorch does not guarantee that a handle keeps the memory alive
        self._handle: Handle | None = handle

    @classmethod
    def allocate(cls, size: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
        """Allocate buffers of ``size`` bytes on the ranks of ``group``, with undefined content. Collective.

        Raises:
            RuntimeError: on all ranks, if any rank lacks memory; or the GPUs cannot map each other's memory.
        """
        own, reason = None, "another rank lacks the memory"
        try:
            own = torch_symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            reason = str(error)
        # Without this check the other ranks would wait for ever in the rendezvous for a rank that lacks memory.
        if not all(gathered(int(own is not None), group, device)) or own is None:
            raise RuntimeError(f"{size:,} bytes of memory to be shared: {reason}")
        handle: Any = torch_symmetric_memory.rendezvous(own, group)
        return cls(own, handle, group.rank(), group.size())

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return a view of a rank's buffer, starting at byte ``offset``.

        Raises:
            ValueError: the view exceeds the buffer, or ``offset`` is not a multiple of the element size.
        """
        if offset % dtype.itemsize or not 0 <= offset <= self.size - math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{shape} of {dtype} at byte {offset} of {self.size}")
        return self._mapped.get_buffer(rank, torch.Size(shape), dtype, offset // dtype.itemsize)

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> tuple[Tensor, ...]:
        """Return the same view of every rank's buffer, in the order of the ranks.

        Args:
            offset: start of the view in bytes.
        """
        return tuple(self.tensor(rank, shape, dtype, offset) for rank in range(self.ranks))

    @functools.cached_property
    def addresses(self) -> Tensor:
        """Return the start address of each rank's buffer for kernels, [ranks] int64 on the device; not in captures."""
        assert self._own is not None
        return torch.tensor(list(self._mapped.buffer_ptrs), dtype=torch.int64, device=self._own.device)

    def put_signal(self, rank: int, channel: int = 0) -> None:
        """Set a signal at another rank, after this rank's previous signal there on ``channel`` is cleared."""
        self._mapped.put_signal(rank, channel)

    def wait_signal(self, rank: int, channel: int = 0) -> None:
        """Wait for a signal from another rank on ``channel``, and clear it."""
        self._mapped.wait_signal(rank, channel)

    def barrier(self, channel: int = 0) -> None:
        """Wait, on the current stream, until all ranks have reached the barrier of ``channel``."""
        self._mapped.barrier(channel)

    def close(self) -> None:
        """Release this rank's buffer; mappings of it on other ranks remain until those ranks close theirs."""
        self._handle = self._own = None

    @property
    def _mapped(self) -> Handle:
        if self._handle is None:
            raise ValueError("this memory has been closed")
        return self._handle


def attempt(build: Callable[[], T], group: dist.ProcessGroup, device: torch.device) -> tuple[T | None, str]:
    """Return the result of ``build``, which uses symmetric memory, or the reason why it is not possible. Collective.

    Args:
        build: collective function; raises RuntimeError if this rank cannot map the memory.

    Returns:
        The result and an empty text, or None and the reason. Either all ranks get a result or none does.
    """
    refused = refusal(group, device)
    if refused is not None:
        return None, refused
    built, reason = None, "another rank cannot map its neighbours' memory"
    try:
        built = build()
    except RuntimeError as error:
        reason = f"the GPUs cannot map each other's memory: {str(error).splitlines()[0]}"
    if not all(gathered(int(built is not None), group, device)):
        return None, reason
    return built, ""


def refusal(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why symmetric memory cannot be used, or None if it may work; the same on all ranks. Collective."""
    if device.type != "cuda":
        return f"it needs CUDA devices, not {device.type}"
    backend = torch_symmetric_memory.get_backend(device)
    if backend != "CUDA":
        return f"it needs PyTorch's CUDA backend for symmetric memory, not {backend}"
    if not one_machine(group, device):
        return "the ranks are on several machines"
    return None


def one_machine(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether all ranks of a group are on one machine; the same on all ranks. Collective."""
    return len(set(gathered(_machine(), group, device))) == 1


def gathered(value: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the ``value`` of every rank, on the host. Collective."""
    values = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(values, torch.tensor([value], device=device), group=group)
    found: list[int] = values.tolist()
    return found


def _machine() -> int:
    """Return a number that identifies this machine, or the machine that ``MACHINE_VARIABLE`` names.

    Host names do not identify it, because containers of one machine may have different ones.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = os.environ.get(MACHINE_VARIABLE) or (boot.read_text() if boot.exists() else socket.gethostname())
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
