"""Process groups that only their members create, even when all ranks form groups of the same kind at once.

``torch.distributed.new_group`` requires every rank of the job for every group, and NCCL splits the world communicator
once per group. With ``use_local_synchronization`` only the members create a group, so each rank creates only its own.
Members then find each other by a name that contains the ranks and the number of groups that this process has created.
Therefore every rank must call :func:`make` equally often, with itself alone where it belongs to no group of a kind.
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
    """Timeout of collectives in groups that are created from now on; None for PyTorch's default."""

    timeout: timedelta | None = None


def wait_at_most(timeout: timedelta) -> None:
    """Set the timeout of collectives in the world group, if it exists, and in groups created from now on."""
    _Waiting.timeout = timeout
    if dist.is_initialized():
        # torch 2.11 has only the private name.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timeout)


def make(ranks: Sequence[int], ctas: Ctas = NCCLS_OWN) -> dist.ProcessGroup:
    """Create and return the process group of ``ranks``, which include this rank. Collective over the world.

    All ranks of the world call it equally often, and the members of a group in the same call. A single rank also gets a
    group, only to keep the counts equal; this group uses no GPU resources.

    Args:
        ranks: ranks in the world, ascending, the same on all members.
        ctas: NCCL's use of the GPU for this group.
    """
    asked = options(ctas) if len(ranks) > 1 else None
    if asked is not None and _Waiting.timeout is not None:
        asked._timeout = _Waiting.timeout  # PyTorch warns if the two timeouts differ
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
    """Unbind the default group from its device inside the block, yield this device, and bind it again even on failure.

    With a bound default group NCCL would split its communicator for the new group, which requires all ranks.
    """
    world: Any = dist.group.WORLD
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device
