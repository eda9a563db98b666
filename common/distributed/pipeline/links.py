"""What neighbouring stages hand on to each other, each way in a queue of its own.

Every link, from one stage to the next in one direction, is a process group of its own two ranks. So a message waits for
none of another link, whatever the order in which stages come to them, and NCCL moves it on a stream of its own. Both
ends know which messages come in which order; nothing but the tensors is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.layout import Layout
from common.distributed.pipeline.order import Direction

AHEAD = 2
"""Receives that are posted on a link before they are wanted: the message wanted next travels during the work before."""

OUTSTANDING = 2
"""Messages that a sender keeps until they are known to be sent.

Neither limit costs time: :func:`common.distributed.pipeline.timing.simulate` finds that one of each would do.
"""


class Handed(NamedTuple):
    """Shape and dtype of what one part of the model hands on to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Outbox:
    """Sends to one neighbour, beside what comes next.

    Args:
        group: the two ranks.
        peer: the other one's rank in it.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._underway: deque[tuple[Tensor, dist.Work]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor, which is held until it is sent and must not change before."""
        while len(self._underway) >= OUTSTANDING:
            self._finish_oldest()
        self._underway.append((tensor, _start(dist.isend, tensor, self._group, self._peer)))

    def finish(self) -> None:
        """Wait until all is sent; on a GPU it is the current stream that waits."""
        while self._underway:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        _, work = self._underway.popleft()
        work.wait()


class Inbox:
    """Receives from one neighbour, with room for what comes next.

    Args:
        group: the two ranks.
        peer: the other one's rank in it.
        device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._peer, self._device = group, peer, device
        self._wanted: deque[Handed] = deque()
        self._underway: deque[tuple[Tensor, dist.Work]] = deque()

    def begin(self, wanted: Sequence[Handed]) -> None:
        """Say what comes, in order, and post the first receives.

        Raises:
            RuntimeError: what was said to come before has not been taken.
        """
        if self._wanted or self._underway:
            raise RuntimeError("a pipeline begins an iteration, and messages of the one before were not taken")
        self._wanted.extend(wanted)
        for _ in range(AHEAD):
            self._post()

    def take(self) -> Tensor:
        """The next message; on a GPU it is the current stream that waits for it."""
        tensor, work = self._underway.popleft()
        self._post()
        work.wait()
        return tensor

    def _post(self) -> None:
        if self._wanted:
            shape, dtype = self._wanted.popleft()
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._underway.append((tensor, _start(dist.irecv, tensor, self._group, self._peer)))


class Links:
    """All links of this rank's stage. Collective over all ranks.

    Args:
        layout: the ranks.
        chunks: of each stage; with several the last stage is followed by the first.

    Attributes:
        inboxes, outboxes: by direction of the pass; none where nothing comes or goes.
    """

    def __init__(self, layout: Layout, chunks: int) -> None:
        self.inboxes: dict[Direction, Inbox] = {}
        self.outboxes: dict[Direction, Outbox] = {}
        stages, stage = layout.size("pp"), layout.coordinate("pp")
        directions: tuple[Direction, Direction] = ("forward", "backward")
        for direction in directions:
            for first, group in layout.links("pp", direction, around=chunks > 1).items():
                sends = stage == (first if direction == "forward" else (first + 1) % stages)
                peer = 1 - dist.get_group_rank(group, layout.rank)
                # The first message builds the connection, for which both ends must be there. Links come in one order on
                # all ranks, so that no two wait for each other here.
                greeting = torch.zeros(1, device=layout.device)
                _start(dist.isend if sends else dist.irecv, greeting, group, peer).wait()
                if sends:
                    self.outboxes[direction] = Outbox(group, peer)
                else:
                    self.inboxes[direction] = Inbox(group, peer, layout.device)

    def finish(self) -> None:
        """Wait until all is sent."""
        for outbox in self.outboxes.values():
            outbox.finish()


class StandInBox:
    """In the place of an outbox or an inbox: noise comes, and what is sent goes nowhere. Nobody is waited for.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._wanted: deque[Handed] = deque()

    def begin(self, wanted: Sequence[Handed]) -> None:
        """See :meth:`Inbox.begin`."""
        self._wanted.extend(wanted)

    def take(self) -> Tensor:
        """Noise in the place of the next message."""
        shape, dtype = self._wanted.popleft()
        return torch.randn(shape, generator=self._generator, dtype=dtype, device=self._generator.device)

    def send(self, tensor: Tensor) -> None:
        """Nothing is sent."""


class StandIns:
    """In the place of ``links`` where a stage is to run on its own."""

    def __init__(self, links: Links, device: torch.device) -> None:
        self.inboxes = {direction: StandInBox(device) for direction in links.inboxes}
        self.outboxes = {direction: StandInBox(device) for direction in links.outboxes}

    def finish(self) -> None:
        """Nothing is underway."""


def _start(function: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup, peer: int) -> dist.Work:
    (work,) = dist.batch_isend_irecv([dist.P2POp(function, tensor, group=group, group_peer=peer)])
    return work
