"""Choice of the transport for halo exchange."""

from __future__ import annotations

import torch

from common.distributed.spatial.halo import HaloExchange, Transport
from common.distributed.spatial.mailboxes import SymmetricMemory, try_symmetric_memory
from common.distributed.spatial.point_to_point import PointToPoint
from common.distributed.spatial.split import VolumeSplit
from common.errors import UnsupportedImplementation
from common.ops.operation import AUTO

TRANSPORTS = (SymmetricMemory.name, PointToPoint.name)


def build_exchange(split: VolumeSplit, device: torch.device, requested: str = AUTO) -> HaloExchange:
    """Return the halo exchange of a split over two or more ranks. Collective.

    Args:
        requested: one of ``TRANSPORTS``, or ``auto``: symmetric memory if all ranks are on one machine and can map each
            other's memory, else sends and receives.

    Raises:
        UnsupportedImplementation: the transport is unknown, or these ranks cannot use it.
    """
    if requested not in (AUTO, *TRANSPORTS):
        names = ", ".join((AUTO, *TRANSPORTS))
        raise UnsupportedImplementation(f"unknown exchange of halos {requested!r}; choose one of {names}")
    assert split.group is not None  # a split over one rank exchanges nothing
    transport: Transport | None = None
    if requested != PointToPoint.name:
        transport, reason = try_symmetric_memory(split, device)
        if transport is None and requested != AUTO:
            raise UnsupportedImplementation(f"exchange of halos by {requested!r} cannot be used: {reason}")
    return HaloExchange(split, transport or PointToPoint(split.group), device)
