"""Halo exchange through memory that the GPUs of one node map from each other.

A sender writes its plane directly into its neighbour's exchange buffer over NVLink and sets a signal. The neighbour
waits for the signal on the device, copies the plane out, and signals that the buffer is free. Hosts do not synchronise
and planes are not staged. The waiting rank clears each signal, so the sequence is the same in every iteration and in
every graph replay.

The exchange cannot deadlock: a send waits only for a free buffer, which depends only on the previous exchange, and all
ranks run their exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.distributed.spatial.halo import Message
from common.distributed.spatial.split import VolumeSplit
from common.distributed.symmetric_memory import PeerMemory, attempt

FULL, FREE = 0, 1
"""Channels of the signals between two ranks."""

FIRST_CAPACITY = 1 << 22
"""Initial capacity of an exchange buffer in bytes. Every rank allocates two of them; larger planes enlarge them."""


class Mailboxes:
    """Two exchange buffers on every rank, for planes from its previous and from its next rank.

    Args:
        memory: memory for two exchange buffers on each rank, with all signals cleared.
    """

    def __init__(self, memory: PeerMemory) -> None:
        self.capacity = memory.size // 2
        self._memory = memory
        for neighbour in (memory.rank - 1, memory.rank + 1):
            if 0 <= neighbour < memory.ranks:
                memory.put_signal(neighbour, FREE)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send all planes, then receive all planes. Each send must match a receive of the neighbour."""
        for message in sends:
            self._memory.wait_signal(message.peer, FREE)
            self._mailbox(message.peer, self._memory.rank, message.plane).copy_(message.plane)
            self._memory.put_signal(message.peer, FULL)
        for message in receives:
            self._memory.wait_signal(message.peer, FULL)
            message.plane.copy_(self._mailbox(self._memory.rank, message.peer, message.plane))
            self._memory.put_signal(message.peer, FREE)

    def _mailbox(self, owner: int, sender: int, plane: Tensor) -> Tensor:
        """Return the exchange buffer of ``owner`` for planes from ``sender``, in the shape of ``plane``."""
        return self._memory.tensor(owner, plane.shape, plane.dtype, 0 if sender < owner else self.capacity)


class SymmetricMemory:
    """Transport of planes through exchange buffers in symmetric memory, on one node. The constructor is collective.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory.
    """

    name = "symmetric_memory"

    def __init__(self, split: VolumeSplit, device: torch.device) -> None:
        assert split.group is not None  # a split over one rank exchanges nothing
        self._group = split.group
        self._device = device
        self._mailboxes = [self._open(FIRST_CAPACITY)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start the transfer; see :class:`common.distributed.spatial.halo.Transport`.

        Raises:
            RuntimeError: the planes are larger than all previous ones, during a graph capture.
        """
        size = max(message.plane.numel() * message.plane.element_size() for message in (*sends, *receives))
        if size > self._mailboxes[-1].capacity:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"halo planes of {size} bytes meet a capture: run their shapes once before it")
            # Keep the old buffers: graphs that were captured with smaller planes still use them.
            self._mailboxes.append(self._open(1 << (size - 1).bit_length()))
        self._mailboxes[-1].exchange(sends, receives)
        return _nothing

    def _open(self, capacity: int) -> Mailboxes:
        return Mailboxes(PeerMemory.allocate(2 * capacity, self._group, self._device))


def try_symmetric_memory(split: VolumeSplit, device: torch.device) -> tuple[SymmetricMemory | None, str]:
    """Return the transport, or None and the reason if any rank cannot use it. Collective; all ranks agree."""
    assert split.group is not None  # a split over one rank exchanges nothing
    return attempt(lambda: SymmetricMemory(split, device), split.group, device)


def _nothing() -> None:
    """Do nothing, because the whole exchange is already enqueued on the current stream."""
