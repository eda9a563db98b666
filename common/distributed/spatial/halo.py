"""Exchange of boundary planes between the ranks that hold neighbouring slabs of a volume.

A convolution needs planes beyond its slab: the halo. An exchange runs beside the computation, on a stream of its own
that leaves the current one when it starts and joins it again when its planes, or what was computed from them, are used.
The first and the last rank have nothing beyond: a missing halo is zeros, so there is nothing to add for it.

Memory that both streams touch comes from the current stream, before the fork; what the side stream allocates is given
back before the next fork, which waits for the current stream. Nothing needs ``record_stream``, and a captured iteration
may reuse all of it.

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
        peer: the neighbour's rank in the group.
        plane: (N, H, W, C); contiguous where it is received into.
    """

    peer: int
    plane: Tensor


class Transport(Protocol):
    """A way to move planes. All ranks of the group call it alike, on the stream that is current."""

    name: str

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Begin, and return what makes the current stream wait until everything has been sent and received."""
        ...


@dataclass(frozen=True)
class Halos:
    """The planes next to a slab, (N, C, H, W), channels last; None where the volume ends or nobody asked.

    Attributes:
        low: what precedes the slab's first plane.
        high: what follows its last one.
    """

    low: Tensor | None
    high: Tensor | None


class HaloExchange:
    """Exchanges halos along one split.

    Args:
        split: of the volume, over two or more ranks.
        transport: how planes move.
        device: of the slabs.
    """

    def __init__(self, split: VolumeSplit, transport: Transport, device: torch.device) -> None:
        self.split = split
        self.transport = transport
        # Priority: the few blocks of an exchange must not queue behind all those of the convolution beside it.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def start(self, slab_NCDHW: Tensor, to_next: bool = True, to_previous: bool = True) -> PendingHalos:
        """Begin to exchange the boundary planes of a slab. Collective.

        Args:
            slab_NCDHW: this rank's slab; it must not be written before the halos are received.
            to_next: send the last plane on to the next rank, so that everyone gets a low halo.
            to_previous: send the first plane back, so that everyone gets a high halo.
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
        """Run a block on the side stream after ``wait``; the current stream continues after the block."""
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
    """An exchange under way; its planes are received once.

    It holds on to the slab: memory that the caller lets go may be written again at once by the current stream.
    """

    def __init__(self, exchange: HaloExchange, slab: Tensor, wait: Callable[[], None], halos: Halos) -> None:
        self._exchange = exchange
        self._slab: Tensor | None = slab
        self._wait = wait
        self._halos = halos

    @contextlib.contextmanager
    def received(self) -> Iterator[Halos]:
        """The halos, for a block that runs on the exchange's stream; the current stream continues after the block.

        What the block allocates may be used until the next exchange starts, the halos themselves for ever.
        """
        with self._exchange.joined(self._wait):
            yield self._halos
        self._slab = None


def _channels_first(plane_NHWC: Tensor | None) -> Tensor | None:
    return None if plane_NHWC is None else plane_NHWC.permute(0, 3, 1, 2)
