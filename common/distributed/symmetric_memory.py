"""Memory that the ranks of one machine have mapped from each other: every one can read and write that of all.

Buffers are made before graphs are captured, and mapped as long as :class:`PeerMemory` lives, which whoever uses views
of them therefore holds. Signals and barriers are on the device: nothing meets on a host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symmetric_memory
from torch import Tensor

from common.distributed import one_machine

T = TypeVar("T")


class Handle(Protocol):
    """What is used of ``torch._C._distributed_c10d._SymmetricMemory``; everything runs on the current stream."""

    buffer_ptrs: list[int]

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype, storage_offset: int) -> Tensor:
        """A part of another rank's buffer; the offset counts elements of ``dtype``."""
        ...

    def put_signal(self, dst_rank: int, channel: int) -> None:
        """Raise a signal at another rank, once it is down there."""
        ...

    def wait_signal(self, src_rank: int, channel: int) -> None:
        """Wait for a signal from another rank and take it down."""
        ...

    def barrier(self, channel: int) -> None:
        """Wait until all ranks have come here."""
        ...


class PeerMemory:
    """A buffer of the same size on every rank of a group, all mapped by all. :meth:`allocate` makes one.

    Args:
        own: uint8, this rank's buffer.
        handle: of the buffers, all signals down.
        rank, ranks: this rank's place in the group.

    Attributes:
        size: bytes of each buffer.
        rank, ranks: as given.
    """

    def __init__(self, own: Tensor, handle: Handle, rank: int, ranks: int) -> None:
        self.size = own.numel()
        self.rank, self.ranks = rank, ranks
        self._own: Tensor | None = own  # a handle is only said to map memory, not to own it
        self._handle: Handle | None = handle

    @classmethod
    def allocate(cls, size: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
        """Buffers of ``size`` bytes on the ranks of ``group``, of unspecified content. Collective.

        Raises:
            RuntimeError: a rank lacks memory, on all ranks alike; or the GPUs cannot map each other's memory.
        """
        own, reason = None, "another rank lacks the memory"
        try:
            own = torch_symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            reason = str(error)
        # Without this a rank that lacks memory would leave the others waiting for its part of the mapping.
        if not all(one_machine.gathered(int(own is not None), group, device)) or own is None:
            raise RuntimeError(f"{size:,} bytes of memory to be shared: {reason}")
        handle: Any = torch_symmetric_memory.rendezvous(own, group)
        return cls(own, handle, group.rank(), group.size())

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A part of a rank's buffer, from byte ``offset`` on.

        Raises:
            ValueError: it does not lie within the buffer, or begins inside an element.
        """
        if offset % dtype.itemsize or not 0 <= offset <= self.size - math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{shape} of {dtype} at byte {offset} of {self.size}")
        return self._mapped.get_buffer(rank, torch.Size(shape), dtype, offset // dtype.itemsize)

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> tuple[Tensor, ...]:
        """The same part of every rank's buffer."""
        return tuple(self.tensor(rank, shape, dtype, offset) for rank in range(self.ranks))

    @functools.cached_property
    def addresses(self) -> Tensor:
        """[ranks], int64, on the device: where each rank's buffer begins, for kernels; made outside of captures."""
        assert self._own is not None
        return torch.tensor(list(self._mapped.buffer_ptrs), dtype=torch.int64, device=self._own.device)

    def put_signal(self, rank: int, channel: int = 0) -> None:
        """Raise a signal at another rank, once it is down there."""
        self._mapped.put_signal(rank, channel)

    def wait_signal(self, rank: int, channel: int = 0) -> None:
        """Wait for a signal from another rank, and take it down."""
        self._mapped.wait_signal(rank, channel)

    def barrier(self, channel: int = 0) -> None:
        """Wait, on the current stream, until all ranks have come here."""
        self._mapped.barrier(channel)

    def close(self) -> None:
        """Give this rank's buffer back; what other ranks have mapped of it lasts until they close theirs."""
        self._handle = self._own = None

    @property
    def _mapped(self) -> Handle:
        if self._handle is None:
            raise ValueError("this memory has been closed")
        return self._handle


def attempt(build: Callable[[], T], group: dist.ProcessGroup, device: torch.device) -> tuple[T | None, str]:
    """What ``build`` makes of memory that the ranks map from each other, or why they cannot. Collective.

    Args:
        build: collective; raises RuntimeError where this rank cannot.
        group: the ranks.
        device: this rank's.

    Returns:
        What was built, and an empty text; or None, and the reason. All ranks get the same.
    """
    refused = one_machine.refusal(group, device)
    if refused is not None:
        return None, refused
    built, reason = None, "another rank cannot map its neighbours' memory"
    try:
        built = build()
    except RuntimeError as error:
        reason = f"the GPUs cannot map each other's memory: {str(error).splitlines()[0]}"
    if not all(one_machine.gathered(int(built is not None), group, device)):
        return None, reason
    return built, ""
