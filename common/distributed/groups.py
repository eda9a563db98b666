"""Process groups that only their members make, all of one kind at a time.

``torch.distributed.new_group`` wants every rank of the job for every group: where thousands of ranks have a thousand
groups of a kind, each rank goes through all of them, and NCCL splits the communicator of all ranks once for each. With
``use_local_synchronization`` members alone make a group, and a rank makes its own only, whatever the number of ranks.

Two things stand in the way. Members find each other by a name, which PyTorch makes of the ranks and of how many groups
this process has had: so every rank calls :func:`make` equally often, for itself alone where it is in no group of a
kind. And where the default group is bound to a device NCCL would still split its communicator, which takes all ranks,
and tells the parts apart by a hash: so the new group is made as if the default one were not bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.config.schema import Ctas
from common.distributed.ctas import NCCLS_OWN, options


class _Waiting:
    """How long collectives of groups wait that are made from now on; None for as long as PyTorch lets them."""

    timeout: timedelta | None = None


def wait_at_most(timeout: timedelta) -> None:
    """Let collectives of the world, if there is one, and of the groups that are made from now on wait so long."""
    _Waiting.timeout = timeout
    if dist.is_initialized():
        # torch 2.11 has the private name only.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timeout)


def make(ranks: Sequence[int], ctas: Ctas = NCCLS_OWN) -> dist.ProcessGroup:
    """The process group of ``ranks``, among them this one. Collective over the world, where ranks form such groups.

    All ranks of the world call it equally often, and those of a group in the same turn. It connects the ranks; a rank
    that is alone has a group only for the sake of the count, which takes nothing of a GPU.

    Args:
        ranks: of the world, ascending, the same on all of them.
        ctas: what NCCL takes of a GPU for this group's work.
    """
    asked = options(ctas) if len(ranks) > 1 else None
    if asked is not None and _Waiting.timeout is not None:
        asked._timeout = _Waiting.timeout  # PyTorch warns where the two differ
    with _unbound() as device:
        group: Any = dist.new_group(
            list(ranks),
            timeout=_Waiting.timeout,
            use_local_synchronization=True,
            pg_options=asked,
            device_id=device if len(ranks) > 1 else None,
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextlib.contextmanager
def _unbound() -> Iterator[torch.device | None]:
    """Within it the default group has no device; the device that it has outside."""
    world: Any = dist.group.WORLD
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device
