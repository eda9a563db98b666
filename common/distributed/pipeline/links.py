"""Links that carry tensors between neighbouring pipeline stages.

Every link, from one stage to the next in one direction, is a separate process group of two ranks. A message therefore
never waits for another link, whatever the order in which stages use their links, and NCCL uses a separate stream per
link. Both ends know the order of the messages, so only tensors are sent.
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
"""Number of receives posted on a link in advance, so that the next message is transferred during the preceding work."""

OUTSTANDING = 2
"""Maximum number of messages that a sender holds until their transfer has completed.

Neither limit costs time: one of each is enough in the simulation of
``tests/common/distributed/pipeline/test_pipeline_order.py``.
"""


class Handed(NamedTuple):
    """Shape and dtype of the tensor that one part of the model passes to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Outbox:
    """Asynchronous sender to one neighbour.

    Args:
        group: process group of the two ranks.
        peer: rank of the neighbour in the group.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._underway: deque[tuple[Tensor, dist.Work]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor. It is referenced until it is sent and must not change before."""
        while len(self._underway) >= OUTSTANDING:
            self._finish_oldest()
        self._underway.append((tensor, _start(dist.isend, tensor, self._group, self._peer)))

    def finish(self) -> None:
        """Make the current stream wait until all messages are sent. On a GPU the host does not wait."""
        while self._underway:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        _, work = self._underway.popleft()
        work.wait()


class Inbox:
    """Asynchronous receiver from one neighbour.

    Args:
        group: process group of the two ranks.
        peer: rank of the neighbour in the group.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._peer, self._device = group, peer, device
        self._wanted: deque[Handed] = deque()
        self._underway: deque[tuple[Tensor, dist.Work]] = deque()

    def begin(self, wanted: Sequence[Handed]) -> None:
        """Set the expected messages, in order, and post the first receives.

        Raises:
            RuntimeError: messages of the previous iteration have not been taken.
        """
        if self._wanted or self._underway:
            raise RuntimeError("a pipeline begins an iteration, and messages of the one before were not taken")
        self._wanted.extend(wanted)
        for _ in range(AHEAD):
            self._post()

    def take(self) -> Tensor:
        """Return the next message, for which the current stream waits. On a GPU the host does not wait."""
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
        chunks: number of chunks per stage; with several, the last stage is also linked to the first.

    Attributes:
        inboxes, outboxes: receivers and senders by direction of the pass; absent where no messages are exchanged.
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
                # The first message builds the connection and blocks until both ends take part. All ranks connect their
                # links in the same order, so this cannot deadlock.
                greeting = torch.zeros(1, device=layout.device)
                _start(dist.isend if sends else dist.irecv, greeting, group, peer).wait()
                if sends:
                    self.outboxes[direction] = Outbox(group, peer)
                else:
                    self.inboxes[direction] = Inbox(group, peer, layout.device)

    def finish(self) -> None:
        """Make the current stream wait until all outgoing messages are sent. On a GPU the host does not wait."""
        for outbox in self.outboxes.values():
            outbox.finish()


class SyntheticMailbox:
    """Synthetic outbox or inbox: it returns noise and drops sent tensors, without waiting for another rank."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._wanted: deque[Handed] = deque()

    def begin(self, wanted: Sequence[Handed]) -> None:
        """Set the expected messages; see :meth:`Inbox.begin`."""
        self._wanted.extend(wanted)

    def take(self) -> Tensor:
        """Return noise of the shape and dtype of the next message."""
        shape, dtype = self._wanted.popleft()
        return torch.randn(shape, generator=self._generator, dtype=dtype, device=self._generator.device)

    def send(self, tensor: Tensor) -> None:
        """Drop the tensor."""


class SyntheticLinks:
    """Synthetic replacement of ``links`` to run one stage alone."""

    def __init__(self, links: Links, device: torch.device) -> None:
        self.inboxes = {direction: SyntheticMailbox(device) for direction in links.inboxes}
        self.outboxes = {direction: SyntheticMailbox(device) for direction in links.outboxes}

    def finish(self) -> None:
        """Do nothing, because no transfers are pending."""


def _start(function: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup, peer: int) -> dist.Work:
    (work,) = dist.batch_isend_irecv([dist.P2POp(function, tensor, group=group, group_peer=peer)])
    return work
