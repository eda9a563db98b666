"""The store that all ranks of a job share, whatever their role: what the job's rank 0 tells, and where all ranks meet.

A process group belongs to one role; this belongs to the job. It carries a few small values at the start and the end of
a run, never anything within the iteration.
"""

from __future__ import annotations

import json
from datetime import timedelta

import torch.distributed as dist

from common.distributed.rank_info import RankInfo

_joined: list[tuple[dist.Store, int, int]] = []
"""The store, this process's rank in the job and the job's ranks; empty while the process is in no job."""
_jobs: list[int] = []
"""Ranks of each job that this process has been in."""


def join(store: dist.Store, rank_info: RankInfo) -> None:
    """Make ``store`` that of this process's job."""
    _joined[:] = [(store, rank_info.rank, rank_info.world_size)]
    _jobs.append(rank_info.world_size)


def leave() -> None:
    """Forget the job's store."""
    _joined.clear()


def joined() -> bool:
    """Whether this process is in a job of several ranks."""
    return bool(_joined)


def has_joined() -> bool:
    """Whether this process is or was in a job of several ranks."""
    return bool(_jobs)


def rank() -> int | None:
    """This process's rank in the job; None where it is in no job of several ranks."""
    return _joined[0][1] if _joined else None


def current() -> dist.Store | None:
    """The job's store; that of the process group if somebody else made it; None for a rank alone."""
    if _joined:
        return _joined[0][0]
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def from_rank_0(name: str, value: str, timeout: timedelta | None = None) -> str:
    """The ``value`` that the job's rank 0 gives to ``name``; see :func:`from_rank`."""
    return from_rank(0, name, value, timeout)


def from_rank(teller: int, name: str, value: str, timeout: timedelta | None = None) -> str:
    """The ``value`` that rank ``teller`` of the job gives to ``name``; its own value for a rank alone.

    Ranks of any role ask, each as often as the teller calls this with the name.

    Args:
        teller: rank in the job.
        name: of the value.
        value: counts on the teller.
        timeout: longest wait for the teller; None for that of the store.
    """
    if not _joined:
        return value
    store, rank, _ = _joined[0]
    key = f"suite/{name}/{_turn(name)}"
    if rank == teller:
        store.set(key, value)
        return value
    if timeout is not None:
        store.wait([key], timeout)
    return bytes(store.get(key)).decode()


def from_all_ranks(name: str, value: str) -> list[str]:
    """The values that the job's ranks give to ``name``, in their order; its own value for a rank alone.

    Ranks of any role call this, each as often as the others with the name.
    """
    if not _joined:
        return [value]
    store, rank, world_size = _joined[0]
    key = f"suite/{name}/{_turn(name)}"
    store.set(f"{key}/{rank}", value)
    if rank == 0:  # alone, so that the store gets few requests
        store.set(key, json.dumps([bytes(store.get(f"{key}/{other}")).decode() for other in range(world_size)]))
    found: list[str] = json.loads(bytes(store.get(key)))
    return found


def meet(name: str, timeout: timedelta) -> None:
    """Wait until all ranks of the job have called this with ``name``, at most ``timeout``."""
    if not _joined:
        return
    store, _, world_size = _joined[0]
    key = f"suite/{name}/{_turn(name)}"
    if store.add(f"{key}/arrived", 1) == world_size:
        store.set(key, "1")
    store.wait([key], timeout)


def _turn(name: str) -> int:
    """How often this rank has asked for ``name``: a launcher's store may outlive several runs of a sweep."""
    store, rank, _ = _joined[0]
    return int(store.add(f"suite/{name}/turn of rank {rank}", 1))
