"""Halos through memory that the GPUs of one node have mapped from each other.

A sender stores its plane straight into its neighbour's mailbox, over NVLink, and raises a signal; the neighbour waits
for the signal on the device, copies the plane out, and signals back that the mailbox is free. Nothing meets on a host,
and of a plane nothing is staged. Every signal that is raised is taken down by the one who waited for it, so the
sequence is the same in every iteration and in every replay of a graph.

No rank can wait for ever: a plane is sent only once its mailbox is free, which depends on the exchange before alone,
and all ranks run their exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from common.distributed import one_machine
from common.distributed.spatial.halo import Message
from common.distributed.spatial.split import VolumeSplit

FULL, FREE = 0, 1
"""Channels of the signals between two ranks."""

FIRST_CAPACITY = 1 << 22
"""Bytes of a mailbox before a larger plane is sent; two of them lie in every rank's buffer."""


class Handle(Protocol):
    """What is used of ``torch._C._distributed_c10d._SymmetricMemory``; everything runs on the current stream."""

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype, storage_offset: int) -> Tensor:
        """A part of another rank's buffer; the offset counts elements of ``dtype``."""
        ...

    def put_signal(self, dst_rank: int, channel: int) -> None:
        """Raise a signal at another rank, once it is down there."""
        ...

    def wait_signal(self, src_rank: int, channel: int) -> None:
        """Wait for a signal from another rank and take it down."""
        ...


class Mailboxes:
    """Two mailboxes on every rank, for the planes of its previous and of its next rank.

    Args:
        handle: the mapped buffers, of ``2 * capacity`` bytes each, all signals down.
        rank, ranks: this rank's place in the group.
        capacity: bytes of a mailbox.
    """

    def __init__(self, handle: Handle, rank: int, ranks: int, capacity: int) -> None:
        self.capacity = capacity
        self._handle = handle
        self._rank = rank
        for neighbour in (rank - 1, rank + 1):
            if 0 <= neighbour < ranks:
                handle.put_signal(neighbour, FREE)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send all planes, then receive all. Every neighbour that is sent to receives, and the other way round."""
        for message in sends:
            self._handle.wait_signal(message.peer, FREE)
            self._mailbox(message.peer, self._rank, message.plane).copy_(message.plane)
            self._handle.put_signal(message.peer, FULL)
        for message in receives:
            self._handle.wait_signal(message.peer, FULL)
            message.plane.copy_(self._mailbox(self._rank, message.peer, message.plane))
            self._handle.put_signal(message.peer, FREE)

    def _mailbox(self, owner: int, sender: int, plane: Tensor) -> Tensor:
        """The mailbox of ``owner`` for planes from ``sender``, in the shape of ``plane``."""
        offset = 0 if sender < owner else self.capacity // plane.element_size()
        return self._handle.get_buffer(owner, plane.shape, plane.dtype, offset)


class SymmetricMemory:
    """Planes through mailboxes. Collective to build.

    Args:
        split: over the ranks of one node.
        device: this rank's GPU.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory.
    """

    name = "symmetric_memory"

    def __init__(self, split: VolumeSplit, device: torch.device) -> None:
        assert split.group is not None  # a split over one rank exchanges nothing
        self._split = split
        self._group = split.group
        self._device = device
        self._buffers: list[Tensor] = []  # a handle is only said to map memory, not to own it
        self._mailboxes = [self._open(FIRST_CAPACITY)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """See :class:`common.distributed.spatial.halo.Transport`.

        Raises:
            RuntimeError: planes larger than all before, while a graph is being captured.
        """
        size = max(message.plane.numel() * message.plane.element_size() for message in (*sends, *receives))
        if size > self._mailboxes[-1].capacity:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"halo planes of {size} bytes meet a capture: run their shapes once before it")
            # Graphs that were captured with smaller planes go on using the mailboxes that they know.
            self._mailboxes.append(self._open(1 << (size - 1).bit_length()))
        self._mailboxes[-1].exchange(sends, receives)
        return _nothing

    def _open(self, capacity: int) -> Mailboxes:
        buffer = symmetric_memory.empty(2 * capacity, dtype=torch.uint8, device=self._device)
        handle = symmetric_memory.rendezvous(buffer, self._group)
        self._buffers.append(buffer)
        return Mailboxes(handle, self._split.index, self._split.ranks, capacity)


def try_symmetric_memory(split: VolumeSplit, device: torch.device) -> tuple[SymmetricMemory | None, str]:
    """Build the transport where every rank can, or say why not. Collective; all ranks get the same answer."""
    assert split.group is not None  # a split over one rank exchanges nothing
    refused = one_machine.refusal(split.group, device)
    if refused is not None:
        return None, refused
    transport, reason = None, "another rank cannot map its neighbours' memory"
    try:
        transport = SymmetricMemory(split, device)
    except RuntimeError as error:
        reason = f"the GPUs cannot map each other's memory: {str(error).splitlines()[0]}"
    if not all(one_machine.gathered(int(transport is not None), split.group, device)):
        return None, reason
    return transport, ""


def _nothing() -> None:
    """Everything was queued on the current stream."""
