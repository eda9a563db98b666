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

import torch
from torch import Tensor

from common.distributed.spatial.halo import Message
from common.distributed.spatial.split import VolumeSplit
from common.distributed.symmetric_memory import PeerMemory, attempt

FULL, FREE = 0, 1
"""Channels of the signals between two ranks."""

FIRST_CAPACITY = 1 << 22
"""Bytes of a mailbox before a larger plane is sent; two of them lie in every rank's buffer."""


class Mailboxes:
    """Two mailboxes on every rank, for the planes of its previous and of its next rank.

    Args:
        memory: two mailboxes on each rank, all signals down.
    """

    def __init__(self, memory: PeerMemory) -> None:
        self.capacity = memory.size // 2
        self._memory = memory
        for neighbour in (memory.rank - 1, memory.rank + 1):
            if 0 <= neighbour < memory.ranks:
                memory.put_signal(neighbour, FREE)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send all planes, then receive all. Every neighbour that is sent to receives, and the other way round."""
        for message in sends:
            self._memory.wait_signal(message.peer, FREE)
            self._mailbox(message.peer, self._memory.rank, message.plane).copy_(message.plane)
            self._memory.put_signal(message.peer, FULL)
        for message in receives:
            self._memory.wait_signal(message.peer, FULL)
            message.plane.copy_(self._mailbox(self._memory.rank, message.peer, message.plane))
            self._memory.put_signal(message.peer, FREE)

    def _mailbox(self, owner: int, sender: int, plane: Tensor) -> Tensor:
        """The mailbox of ``owner`` for planes from ``sender``, in the shape of ``plane``."""
        return self._memory.tensor(owner, plane.shape, plane.dtype, 0 if sender < owner else self.capacity)


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
        self._group = split.group
        self._device = device
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
        return Mailboxes(PeerMemory.allocate(2 * capacity, self._group, self._device))


def try_symmetric_memory(split: VolumeSplit, device: torch.device) -> tuple[SymmetricMemory | None, str]:
    """Build the transport where every rank can, or say why not. Collective; all ranks get the same answer."""
    assert split.group is not None  # a split over one rank exchanges nothing
    return attempt(lambda: SymmetricMemory(split, device), split.group, device)


def _nothing() -> None:
    """Everything was queued on the current stream."""
