"""Exchange of boundary planes between the ranks that hold neighbouring slabs of a volume.

A convolution reads planes beyond its slab: the halo. An exchange overlaps with computation on a side stream. This
stream forks from the current stream at the start and joins it again when the planes, or results computed from them, are
used. At the ends of the volume the halo is zeros, so there is nothing to exchange or to add.

Memory that both streams use is allocated on the current stream before the fork. Memory that the side stream allocates
is freed before the next fork, which waits for the current stream. So ``record_stream`` is not needed, and a captured
iteration can reuse all memory.

Two transports carry the planes: sends and receives of ``torch.distributed`` (NCCL between GPUs, on one or more nodes;
Gloo on CPUs), or memory that the GPUs of one node map from each other.

Shapes: N samples, C channels, D H W slab.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.spatial.split import VolumeSplit
from common.distributed.symmetric_memory import PeerMemory, attempt
from common.errors import UnsupportedImplementation
from common.ops.operation import AUTO

FULL, FREE = 0, 1
"""Channels of the signals between two ranks."""

FIRST_CAPACITY = 1 << 22
"""Initial capacity of an exchange buffer in bytes. Every rank allocates two of them; larger planes enlarge them."""


@dataclass(frozen=True)
class HaloMessage:
    """One plane to or from a neighbour.

    Attributes:
        peer: rank of the neighbour in the group.
        plane: (N, H, W, C); contiguous if it is received.
    """

    peer: int
    plane: Tensor


class Transport(Protocol):
    """Method to transfer planes. All ranks of the group call it in the same order, on the current stream."""

    name: str

    def start(self, sends: Sequence[HaloMessage], receives: Sequence[HaloMessage]) -> Callable[[], None]:
        """Start the transfer. Return a function that makes the current stream wait for all sends and receives."""
        ...


@dataclass(frozen=True)
class Halos:
    """Planes next to a slab, (N, C, H, W) channels last; None at the end of the volume or if not requested.

    Attributes:
        low: plane before the first plane of the slab.
        high: plane after the last plane of the slab.
    """

    low: Tensor | None
    high: Tensor | None


class HaloExchange:
    """Exchange of halos along one split over two or more ranks."""

    def __init__(self, split: VolumeSplit, transport: Transport, device: torch.device) -> None:
        self.split = split
        self.transport = transport
        # High priority: the few thread blocks of an exchange must not queue behind those of a running convolution.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def start(self, slab_NCDHW: Tensor, to_next: bool = True, to_previous: bool = True) -> PendingHalos:
        """Start to exchange the boundary planes of a slab. Collective.

        Args:
            slab_NCDHW: slab of this rank; it must not be written before the halos are received.
            to_next: send the last plane to the next rank, which provides the low halos.
            to_previous: send the first plane to the previous rank, which provides the high halos.
        """
        index, last = self.split.index, self.split.ranks - 1
        N, C, D, H, W = slab_NCDHW.shape
        slab_NDHWC = slab_NCDHW.permute(0, 2, 3, 4, 1)
        low = slab_NCDHW.new_empty(N, H, W, C) if to_next and index > 0 else None
        high = slab_NCDHW.new_empty(N, H, W, C) if to_previous and index < last else None
        sends, receives = [], []
        if to_next and index < last:
            sends.append(HaloMessage(index + 1, slab_NDHWC[:, D - 1]))
        if to_previous and index > 0:
            sends.append(HaloMessage(index - 1, slab_NDHWC[:, 0]))
        if low is not None:
            receives.append(HaloMessage(index - 1, low))
        if high is not None:
            receives.append(HaloMessage(index + 1, high))
        with self._forked():
            wait = self.transport.start(sends, receives)
        return PendingHalos(self, slab_NCDHW, wait, Halos(_channels_first(low), _channels_first(high)))

    @contextlib.contextmanager
    def joined(self, wait: Callable[[], None]) -> Iterator[None]:
        """Run the block on the side stream after ``wait``; afterwards the current stream waits for the block.

        If the block fails, the current stream does not wait.
        """
        if self._stream is None:
            wait()
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream):
            wait()
            yield
        current.wait_stream(self._stream)

    @contextlib.contextmanager
    def _forked(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


class PendingHalos:
    """Running exchange; its planes can be received once.

    It keeps a reference to the slab, because the current stream could otherwise reuse the slab's memory too early.
    """

    def __init__(self, exchange: HaloExchange, slab: Tensor, wait: Callable[[], None], halos: Halos) -> None:
        self._exchange = exchange
        self._slab: Tensor | None = slab
        self._wait = wait
        self._halos = halos

    @contextlib.contextmanager
    def received(self) -> Iterator[Halos]:
        """Yield the halos to a block on the exchange's stream; afterwards the current stream waits for the block.

        Tensors that the block allocates are valid until the next exchange starts; the halos stay valid. If the block
        fails, the current stream does not wait.
        """
        with self._exchange.joined(self._wait):
            yield self._halos
        self._slab = None


def _channels_first(plane_NHWC: Tensor | None) -> Tensor | None:
    return None if plane_NHWC is None else plane_NHWC.permute(0, 3, 1, 2)


class PointToPoint:
    """Transport by batched sends and receives; batching avoids a deadlock between neighbours that both send first."""

    name = "p2p"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, sends: Sequence[HaloMessage], receives: Sequence[HaloMessage]) -> Callable[[], None]:
        """Start the transfer; see :class:`Transport`."""
        # With one sample in channels-last layout the planes are already contiguous, so this makes no copy.
        staged = [HaloMessage(message.peer, message.plane.contiguous()) for message in sends]
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


class HaloBuffers:
    """Two exchange buffers on every rank, for planes from its previous and from its next rank.

    A sender writes its plane directly into its neighbour's exchange buffer over NVLink and sets a signal. The neighbour
    waits for the signal on the device, copies the plane out, and signals that the buffer is free. Hosts do not
    synchronise and planes are not staged. The waiting rank clears each signal, so the sequence is the same in every
    iteration and in every graph replay.

    The exchange cannot deadlock: a send waits only for a free buffer, which depends only on the previous exchange, and
    all ranks run their exchanges in the same order.

    Args:
        memory: memory for two exchange buffers on each rank, with all signals cleared.
    """

    def __init__(self, memory: PeerMemory) -> None:
        self.capacity = memory.size // 2
        self._memory = memory
        for neighbour in (memory.rank - 1, memory.rank + 1):
            if 0 <= neighbour < memory.ranks:
                memory.put_signal(neighbour, FREE)

    def exchange(self, sends: Sequence[HaloMessage], receives: Sequence[HaloMessage]) -> None:
        """Send all planes, then receive all planes. Each send must match a receive of the neighbour."""
        for message in sends:
            self._memory.wait_signal(message.peer, FREE)
            self._buffer(message.peer, self._memory.rank, message.plane).copy_(message.plane)
            self._memory.put_signal(message.peer, FULL)
        for message in receives:
            self._memory.wait_signal(message.peer, FULL)
            message.plane.copy_(self._buffer(self._memory.rank, message.peer, message.plane))
            self._memory.put_signal(message.peer, FREE)

    def _buffer(self, owner: int, sender: int, plane: Tensor) -> Tensor:
        """Return the exchange buffer of ``owner`` for planes from ``sender``, in the shape of ``plane``."""
        return self._memory.tensor(owner, plane.shape, plane.dtype, 0 if sender < owner else self.capacity)


class SymmetricMemory:
    """Transport of planes through exchange buffers in symmetric memory, on one node. The constructor is collective.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory.
    """

    name = "symmetric_memory"

    def __init__(self, split: VolumeSplit, device: torch.device) -> None:
        assert split.group is not None  # a split over one rank exchanges nothing
        self._group = split.group
        self._device = device
        self._buffers = [self._open(FIRST_CAPACITY)]

    def start(self, sends: Sequence[HaloMessage], receives: Sequence[HaloMessage]) -> Callable[[], None]:
        """Start the transfer; see :class:`Transport`.

        Raises:
            RuntimeError: the planes are larger than all previous ones, during a graph capture.
        """
        size = max(message.plane.numel() * message.plane.element_size() for message in (*sends, *receives))
        if size > self._buffers[-1].capacity:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"halo planes of {size} bytes meet a capture: run their shapes once before it")
            # Keep the old buffers: graphs that were captured with smaller planes still use them.
            self._buffers.append(self._open(1 << (size - 1).bit_length()))
        self._buffers[-1].exchange(sends, receives)
        return _nothing

    def _open(self, capacity: int) -> HaloBuffers:
        return HaloBuffers(PeerMemory.allocate(2 * capacity, self._group, self._device))


def try_symmetric_memory(split: VolumeSplit, device: torch.device) -> tuple[SymmetricMemory | None, str]:
    """Return the transport, or None and the reason if any rank cannot use it. Collective; all ranks agree."""
    assert split.group is not None  # a split over one rank exchanges nothing
    return attempt(lambda: SymmetricMemory(split, device), split.group, device)


def _nothing() -> None:
    """Do nothing, because the whole exchange is already enqueued on the current stream."""


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
