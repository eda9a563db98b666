"""Query, key and value of some layers, in pinned memory of the host between forward and backward pass.

They are copied on a stream of their own: to the host while their layer goes on, and back while the layer above runs
backward, into a ring of places on the device. The host never waits. Each pass joins all that it began, and memory is
taken once, so that a graph can hold the copies. On a CPU they are copies, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RING = 2
"""Places on the device: of the layer whose backward pass runs, and of the one below it."""

Qkv = tuple[Tensor, ...]
Rooms = dict[tuple[int, tuple[torch.Size, ...]], Qkv]
"""Memory by layer or place, and shapes."""


@dataclass(eq=False)
class Ticket:
    """What a forward pass has left with the host.

    Attributes:
        layer: whose it is.
        host: the copies.
    """

    layer: int
    host: Qkv


@dataclass
class _Returned:
    """What lies in a place of the ring, from when ``arrived`` is reached."""

    ticket: Ticket
    place: Qkv
    arrived: torch.cuda.Event | None


class QkvOffload:
    """The copies of the first ``layers`` layers; one micro-batch at a time.

    Args:
        layers: how many.
        device: of the decoder.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.layers = layers
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: Rooms = {}
        self._places: Rooms = {}
        self._latest: list[Ticket | None] = [None] * layers
        self._ring: list[_Returned | None] = [None] * RING
        self._leaving: tuple[Qkv, torch.cuda.Event | None] | None = None

    def layer(self, index: int) -> OffloadedLayer:
        """The copies of one layer."""
        return OffloadedLayer(self, index)

    def send(self, layer: int, qkv: Qkv) -> Ticket:
        """Start to copy to the host what lies on the device; it is held until the next layer sends.

        Raises:
            RuntimeError: a graph is captured, and nothing of this shape was sent before.
        """
        self.settle()
        ticket = Ticket(layer, self._room(self._host, layer, qkv, on_host=True))
        self._leaving = qkv, self._copy(qkv, ticket.host)
        self._latest[layer] = ticket
        return ticket

    def settle(self) -> None:
        """Let go of what has been sent, as soon as it has arrived; a forward pass ends with it."""
        if self._leaving is not None:
            self._wait(self._leaving[1])
            self._leaving = None

    def start_return(self, _: Tensor) -> None:
        """Start to bring the last of these layers back; a hook of the gradient with which a backward pass begins."""
        ticket = self._latest[-1]
        assert ticket is not None
        self._bring(ticket)

    def fetch(self, ticket: Ticket) -> Qkv:
        """The copies on the device, valid until the next are fetched; those of the layer below start to come.

        Raises:
            RuntimeError: another forward pass has overwritten them.
        """
        if self._latest[ticket.layer] is not ticket:
            raise RuntimeError(
                f"query, key and value of layer {ticket.layer} were overwritten by a later forward pass: "
                "run the backward pass of each micro-batch before the next one's forward pass"
            )
        returned = self._ring[ticket.layer % RING]
        if returned is None or returned.ticket is not ticket:
            returned = self._bring(ticket)
        self._wait(returned.arrived)
        below = self._latest[ticket.layer - 1] if ticket.layer else None
        if below is not None:
            self._bring(below)
        return returned.place

    def _bring(self, ticket: Ticket) -> _Returned:
        slot = ticket.layer % RING
        place = self._room(self._places, slot, ticket.host, on_host=False)
        returned = _Returned(ticket, place, self._copy(ticket.host, place))
        self._ring[slot] = returned
        return returned

    def _copy(self, source: Qkv, target: Qkv) -> torch.cuda.Event | None:
        """Copy behind what is queued on the current stream; the event is behind the copies."""
        if self._stream is None:
            for part, copied in zip(source, target, strict=True):
                copied.copy_(part)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for part, copied in zip(source, target, strict=True):
                copied.copy_(part, non_blocking=True)
        return self._stream.record_event()

    def _wait(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait for copies."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _room(self, rooms: Rooms, number: int, like: Qkv, on_host: bool) -> Qkv:
        """Memory for tensors like these, the same whenever it is asked for."""
        key = number, tuple(part.shape for part in like)
        if key not in rooms:
            pinned = on_host and self._stream is not None
            if self._stream is not None and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("memory for offloaded layers is taken before a capture: run an iteration first")
            device = torch.device("cpu") if on_host else self._device
            rooms[key] = tuple(
                torch.empty(part.shape, dtype=part.dtype, device=device, pin_memory=pinned) for part in like
            )
        return rooms[key]


@dataclass(frozen=True)
class OffloadedLayer:
    """One layer's part of :class:`QkvOffload`."""

    offload: QkvOffload
    index: int

    def send(self, *qkv: Tensor) -> Ticket:
        """Start to copy them to the host."""
        return self.offload.send(self.index, qkv)

    def fetch(self, ticket: Ticket) -> Qkv:
        """The copies, on the device."""
        return self.offload.fetch(ticket)
