"""Process groups that only their members create, even when all ranks form groups of the same kind at once.

``torch.distributed.new_group`` requires every rank of the job for every group, and NCCL splits the world communicator
once per group. With ``use_local_synchronization`` only the members create a group, so each rank creates only its own.
Members then find each other by a name that contains the ranks and the number of groups that this process has created.
Therefore every rank must call :func:`make` equally often, with itself alone where it belongs to no group of a kind.

The configuration gives the NCCL options of a communicator: number of thread blocks (CTAs) and cluster size.
A :class:`HostGroup` connects ranks of any roles, for tensors in host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.config.system import Ctas
from common.distributed import job_store

Value = TypeVar("Value")

NCCLS_OWN = Ctas()

MOST_OF_LINKS = 2
"""Maximum number of thread blocks of a pipeline link. A waiting receiver would withhold more from matrix products."""

FOR_EVER = timedelta(days=30)
"""Timeout of calls on the host; a message may be hours away. If a peer dies, its connection closes and the call raises
an error."""


def of_all_ranks(value: Value) -> list[Value]:
    """Return a picklable value of each rank, in rank order; without a process group, that of this rank. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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


def of_axes(ctas: Mapping[str, Ctas], axes: tuple[str, ...]) -> Ctas:
    """Return the options of a communicator: those of ``dp`` if included (it moves most data), else of the first axis.

    Args:
        ctas: options by axis; a missing axis uses NCCL's defaults.
        axes: axes that the communicator spans, outermost first.
    """
    leading = "dp" if "dp" in axes else next(iter(axes), "")
    return ctas.get(leading, NCCLS_OWN)


def of_links(ctas: Mapping[str, Ctas], axis: str) -> Ctas:
    """Return the options of a link between two neighbours on ``axis``: at most ``MOST_OF_LINKS`` unless configured."""
    asked = ctas.get(axis, NCCLS_OWN)
    few = asked.max is None and (asked.min or 0) <= MOST_OF_LINKS
    return replace(asked, max=MOST_OF_LINKS) if few else asked


def options(ctas: Ctas) -> Any:
    """Return the options for a new process group. None for NCCL's defaults, and on Gloo, which has no thread blocks."""
    given = {"min_ctas": ctas.min, "max_ctas": ctas.max, "cga_cluster_size": ctas.cluster}
    given = {name: value for name, value in given.items() if value is not None}
    if ctas == NCCLS_OWN or dist.get_backend() != "nccl":
        return None
    made: Any = dist.ProcessGroupNCCL.Options()
    for name, value in given.items():
        setattr(made.config, name, value)
    return made


def in_words(ctas: Ctas) -> str:
    """Return the options as readable text; empty if all are NCCL's defaults."""
    parts = (("at least", ctas.min), ("at most", ctas.max), ("in clusters of", ctas.cluster))
    return ", ".join(f"{words} {value}" for words, value in parts if value is not None)


class HostGroup:
    """Ranks connected by Gloo. All members must create it. Any thread may make a call, but one thread at a time.

    By default only a peer ends a blocking call. A process may exit by :func:`.startup.leave` while one of its threads
    is blocked.

    Args:
        name: name that is unique in the store, over all runs.
        rank: number of this member, from 0.
        store: store that all members share; None for that of the job.
        timeout: longest time that the creation and each call may take.
    """

    def __init__(
        self, name: str, rank: int, size: int, store: dist.Store | None = None, timeout: timedelta = FOR_EVER
    ) -> None:
        store = store or job_store.current()
        assert store is not None, "a job of several ranks has a store"
        self.rank, self.size = rank, size
        # PyTorch's type stubs do not declare its methods.
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout=timeout)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy ``tensor`` from rank 0 to all others, in place. Raises RuntimeError when a peer is gone."""
        self._gloo.broadcast(tensor, root=0).wait()

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send ``tensor`` to ``rank``. Raises RuntimeError when it is gone."""
        self._gloo.send([tensor], rank, 0).wait()

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receive ``tensor`` from ``rank``, in place. Raises RuntimeError when it is gone."""
        self._gloo.recv([tensor], rank, 0).wait()

    def gather(self, tensor: Tensor, into: list[Tensor]) -> None:
        """Copy the ``tensor`` of each member into ``into``, one tensor of the same size per member, in their order.

        Raises RuntimeError when a peer is gone, or after the timeout.
        """
        self._gloo.allgather([into], [tensor]).wait()
