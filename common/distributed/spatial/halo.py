"""Exchange of boundary planes between the ranks that hold neighbouring slabs of a volume.

A convolution reads planes beyond its slab: the halo. An exchange overlaps with computation on a side stream. This
stream forks from the current stream at the start and joins it again when the planes, or results computed from them, are
used. At the ends of the volume the halo is zeros, so there is nothing to exchange or to add.

Memory that both streams use is allocated on the current stream before the fork. Memory that the side stream allocates
is freed before the next fork, which waits for the current stream. So ``record_stream`` is not needed, and a captured
iteration can reuse all memory.

Shapes: N samples, C channels, D H W slab.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.distributed.spatial.split import VolumeSplit


@dataclass(frozen=True)
class Message:
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

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
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
            sends.append(Message(index + 1, slab_NDHWC[:, D - 1]))
        if to_previous and index > 0:
            sends.append(Message(index - 1, slab_NDHWC[:, 0]))
        if low is not None:
            receives.append(Message(index - 1, low))
        if high is not None:
            receives.append(Message(index + 1, high))
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
