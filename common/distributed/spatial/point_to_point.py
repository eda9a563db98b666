"""Halos by sends and receives of ``torch.distributed``: NCCL between GPUs, on one node or several; Gloo on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from common.distributed.spatial.halo import Message


class PointToPoint:
    """Sends and receives, batched so that neighbours who both send first cannot wait for each other.

    Args:
        group: the ranks of the split.
    """

    name = "p2p"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """See :class:`common.distributed.spatial.halo.Transport`."""
        # The planes of one sample lie in one piece already where channels are last.
        staged = [Message(message.peer, message.plane.contiguous()) for message in sends]
        operations = [
            dist.P2POp(function, message.plane, group=self._group, group_peer=message.peer)
            for function, messages in ((dist.isend, staged), (dist.irecv, receives))
            for message in messages
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()
            staged.clear()

        return wait
