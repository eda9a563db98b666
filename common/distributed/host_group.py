"""A group over ranks of any role for tensors in host memory, apart from the roles' process groups."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common.distributed import job_store

FOR_EVER = timedelta(days=30)
"""What is waited for may be hours away. A peer that dies closes its connection, which ends the wait with an error."""
_waiting: set[int] = set()
"""Threads that are within a call."""
_made: list[str] = []
"""Names of the groups that this process has joined."""


class HostGroup:
    """Ranks that are connected by Gloo. All members create it; each call may come from any one thread.

    Nothing ends a call but its peer: a process that leaves while a thread of it is in one does so by :func:`leave`.

    Args:
        name: that no other group in the job's store has, of any run.
        rank: of this process in the group.
        size: number of ranks.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        store = job_store.current()
        assert store is not None, "a job of several ranks has a store"
        _made.append(name)
        # PyTorch's type stubs know no methods of it.
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout=FOR_EVER)

    def broadcast(self, tensor: Tensor) -> None:
        """Bring ``tensor`` from rank 0 to all others, in place; RuntimeError when a peer is gone."""
        with _call():
            self._gloo.broadcast(tensor, root=0).wait()

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send ``tensor`` to ``rank``; RuntimeError when it is gone."""
        with _call():
            self._gloo.send([tensor], rank, 0).wait()

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill ``tensor`` with what ``rank`` sends; RuntimeError when it is gone."""
        with _call():
            self._gloo.recv([tensor], rank, 0).wait()


def leave(work: Callable[[], int]) -> None:
    """Do a process's ``work`` and end the process with the exit code that it returns, or 1 after an exception.

    A thread that waits for a peer would come back into an interpreter that is being taken down, and abort the process:
    after a failure, a process that is in such a group leaves without taking it down.
    """
    code = 1
    try:
        code = work()
    except Exception:
        if not _made:
            raise
        traceback.print_exc()
    if _waiting or (_made and code != 0):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextlib.contextmanager
def _call() -> Iterator[None]:
    thread = threading.get_ident()
    _waiting.add(thread)
    try:
        yield
    finally:
        _waiting.discard(thread)
