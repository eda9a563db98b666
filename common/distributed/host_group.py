"""A group over ranks of any role for tensors in host memory, apart from the roles' process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common.distributed import job_store

FOR_EVER = timedelta(days=30)
"""What is waited for may be hours away. A peer that dies closes its connection, which ends the wait with an error."""


class HostGroup:
    """Ranks that are connected by Gloo. All members create it; each call may come from any one thread.

    Nothing ends a call but its peer: a process may leave while a thread of it is in one, by :func:`.leaving.leave`.

    Args:
        name: that no other group in the job's store has, of any run.
        rank: of this process in the group.
        size: number of ranks.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        store = job_store.current()
        assert store is not None, "a job of several ranks has a store"
        # PyTorch's type stubs know no methods of it.
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout=FOR_EVER)

    def broadcast(self, tensor: Tensor) -> None:
        """Bring ``tensor`` from rank 0 to all others, in place; RuntimeError when a peer is gone."""
        self._gloo.broadcast(tensor, root=0).wait()

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send ``tensor`` to ``rank``; RuntimeError when it is gone."""
        self._gloo.send([tensor], rank, 0).wait()

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill ``tensor`` with what ``rank`` sends; RuntimeError when it is gone."""
        self._gloo.recv([tensor], rank, 0).wait()
