"""Process group over ranks of any roles for tensors in host memory, independent of the roles' process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common.distributed import job_store

FOR_EVER = timedelta(days=30)
"""Timeout of calls; a message may be hours away. If a peer dies, its connection closes and the call raises an error."""


class HostGroup:
    """Ranks connected by Gloo. All members must create it. Any thread may make a call, but one thread at a time.

    Only a peer ends a blocking call. A process may exit by :func:`.leaving.leave` while one of its threads is blocked.

    Args:
        name: name that is unique in the job's store, over all runs.
        rank: rank of this process in the group.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        store = job_store.current()
        assert store is not None, "a job of several ranks has a store"
        # PyTorch's type stubs do not declare its methods.
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout=FOR_EVER)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy ``tensor`` from rank 0 to all others, in place. Raises RuntimeError when a peer is gone."""
        self._gloo.broadcast(tensor, root=0).wait()

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send ``tensor`` to ``rank``. Raises RuntimeError when it is gone."""
        self._gloo.send([tensor], rank, 0).wait()

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receive ``tensor`` from ``rank``, in place. Raises RuntimeError when it is gone."""
        self._gloo.recv([tensor], rank, 0).wait()
