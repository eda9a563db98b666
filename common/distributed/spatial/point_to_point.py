"""Halo exchange by ``torch.distributed`` sends and receives: NCCL between GPUs, on one or more nodes; Gloo on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from common.distributed.spatial.halo import Message


class PointToPoint:
    """Transport by batched sends and receives; batching avoids a deadlock between neighbours that both send first."""

    name = "p2p"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start the transfer; see :class:`common.distributed.spatial.halo.Transport`."""
        # With one sample in channels-last layout the planes are already contiguous, so this makes no copy.
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
