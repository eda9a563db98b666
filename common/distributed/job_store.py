"""Store that all ranks of a job share, over all roles, for broadcasts and barriers.

A process group belongs to one role; this store belongs to the job. It carries a few small values at the start and the
end of a run, and none during training steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from common.distributed.rank_info import RankInfo

_joined: list[tuple[dist.Store, int, int]] = []
"""The store, this process's rank in the job, and the number of ranks; empty while the process is in no job."""
_jobs: list[int] = []
"""Number of ranks of each job that this process has joined."""


def join(store: dist.Store, rank_info: RankInfo) -> None:
    """Set the store of this process's job."""
    _joined[:] = [(store, rank_info.rank, rank_info.world_size)]
    _jobs.append(rank_info.world_size)


def leave() -> None:
    """Clear the store of this process's job."""
    _joined.clear()


def joined() -> bool:
    """Return whether this process is in a job of several ranks."""
    return bool(_joined)


def has_joined() -> bool:
    """Return whether this process is or was in a job of several ranks."""
    return bool(_jobs)


def rank() -> int | None:
    """Return this process's rank in the job; None outside of a job of several ranks."""
    return _joined[0][1] if _joined else None


def current() -> dist.Store | None:
    """Return the job's store, else the store of an existing default process group, else None."""
    if _joined:
        return _joined[0][0]
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def from_rank_0(
    name: str, value: str, timeout: timedelta | None = None, meanwhile: Callable[[], object] | None = None
) -> str:
    """Return the ``value`` that the job's rank 0 passes for ``name``; see :func:`from_rank`."""
    return from_rank(0, name, value, timeout, meanwhile)


def from_rank(
    sender: int,
    name: str,
    value: str,
    timeout: timedelta | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> str:
    """Return the ``value`` that rank ``sender`` of the job passes for ``name``; the own value outside of a job.

    Ranks of any role may call this, each as often with this name as ``sender`` does.

    Args:
        value: ignored on all ranks except ``sender``.
        timeout: longest wait for the sender; None for the timeout of the store.
        meanwhile: called again and again until the sender has passed the value, without a time limit.
    """
    if not _joined:
        return value
    store, rank, _ = _joined[0]
    key = f"suite/{name}/{_turn(name)}"
    if rank == sender:
        store.set(key, value)
        return value
    if meanwhile is not None:
        while not store.check([key]):
            meanwhile()
    elif timeout is not None:
        store.wait([key], timeout)
    return bytes(store.get(key)).decode()


def from_all_ranks(name: str, value: str) -> list[str]:
    """Return the values that the job's ranks pass for ``name``, in rank order; ``[value]`` outside of a job.

    All ranks of the job must call this, equally often with each name.
    """
    if not _joined:
        return [value]
    store, rank, world_size = _joined[0]
    key = f"suite/{name}/{_turn(name)}"
    store.set(f"{key}/{rank}", value)
    if rank == 0:  # only rank 0 reads all values, so that the store gets few requests
        store.set(key, json.dumps([bytes(store.get(f"{key}/{other}")).decode() for other in range(world_size)]))
    found: list[str] = json.loads(bytes(store.get(key)))
    return found


def meet(name: str, timeout: timedelta) -> None:
    """Wait until all ranks of the job have called this with ``name``, at most ``timeout``. No wait outside of a job."""
    if not _joined:
        return
    store, _, world_size = _joined[0]
    key = f"suite/{name}/{_turn(name)}"
    if store.add(f"{key}/arrived", 1) == world_size:
        store.set(key, "1")
    store.wait([key], timeout)


def _turn(name: str) -> int:
    """Increment and return this rank's call count for ``name``. A launcher's store may outlive several runs."""
    store, rank, _ = _joined[0]
    return int(store.add(f"suite/{name}/turn of rank {rank}", 1))
