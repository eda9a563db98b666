"""Simulate the duration of a pipeline iteration from given durations of the units, in any unit of time.

A stage waits for its previous unit, for the result of its neighbour and, if links are limited, for free link buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.distributed.pipeline.order import Unit, follower, order, receives


@dataclass(frozen=True)
class Timing:
    """Result of a simulation.

    Attributes:
        started: for each stage, its units in order with their start times.
        ended: time at which the last unit of any stage ends.
        busy: total working time of each stage.
    """

    started: tuple[tuple[tuple[Unit, float], ...], ...]
    ended: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Return the idle time of the busiest stage, as a fraction of its working time."""
        return (self.ended - max(self.busy)) / max(self.busy)


@dataclass
class _Link:
    """Messages from one stage to the next, with the times at which each was sent, taken and received."""

    ahead: int | None
    transfer: float
    sent: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    there: list[float] = field(default_factory=list)

    def arrive(self) -> None:
        """Compute the arrival times of all messages that have been sent and have a posted receive."""
        while len(self.there) < len(self.sent):
            number = len(self.there)
            begins = self.sent[number]
            if self.ahead is not None and number >= self.ahead:
                if number - self.ahead >= len(self.taken):
                    return
                begins = max(begins, self.taken[number - self.ahead])
            if self.there:
                begins = max(begins, self.there[-1])
            self.there.append(begins + self.transfer)


@dataclass
class _Stage:
    units: list[Unit]
    time: float = 0.0
    started: list[tuple[Unit, float]] = field(default_factory=list)
    working: bool = False

    @property
    def ended(self) -> int:
        """Return the number of completed units."""
        return len(self.started) - self.working


def simulate(
    stages: int,
    chunks: int,
    micro_batches: int,
    forward: float = 1.0,
    backward: float = 2.0,
    *,
    transfer: float = 0.0,
    ahead: int | None = None,
    outstanding: int | None = None,
    orders: Sequence[Sequence[Unit]] | None = None,
) -> Timing:
    """Simulate one iteration of all stages.

    Args:
        stages, chunks, micro_batches: see :func:`common.distributed.pipeline.order.order`.
        forward, backward: duration of a unit.
        transfer: duration of a message; it does not delay the work of sender or receiver.
        ahead: number of receives posted on a link beyond the messages taken; None for no limit. Without a posted
            receive a message waits at its sender.
        outstanding: number of unfinished messages on a link at which a sender waits before the next; None for no limit.
        orders: units of every stage in order; None for the order of :func:`common.distributed.pipeline.order.order`.

    Raises:
        RuntimeError: the stages deadlock.
    """
    ranks = [_Stage(list(orders[r] if orders else order(r, stages, chunks, micro_batches))) for r in range(stages)]
    lengths = {"forward": forward, "backward": backward}
    links = {(d, r): _Link(ahead, transfer) for d in lengths for r in range(stages)}
    while any(stage.ended < len(stage.units) for stage in ranks):
        moved = False
        for rank, stage in enumerate(ranks):
            while stage.ended < len(stage.units) and _work(rank, stage, stages, chunks, lengths, links, outstanding):
                moved = True
        if not moved:
            waiting = {r: stage.units[stage.ended] for r, stage in enumerate(ranks) if stage.ended < len(stage.units)}
            raise RuntimeError(f"the stages of a pipeline wait for each other: {waiting}")
    busy = tuple(sum(lengths[unit.direction] for unit in stage.units) for stage in ranks)
    return Timing(tuple(tuple(stage.started) for stage in ranks), max(stage.time for stage in ranks), busy)


def _work(
    rank: int,
    stage: _Stage,
    stages: int,
    chunks: int,
    lengths: dict[str, float],
    links: dict[tuple[str, int], _Link],
    outstanding: int | None,
) -> bool:
    """Start a stage's next unit or end its running unit. Return False if its time is not known yet."""
    unit = stage.units[len(stage.started) - stage.working]
    if not stage.working:
        starts = stage.time
        if receives(rank, stages, chunks, unit):
            link = links[unit.direction, rank]
            link.arrive()
            if len(link.there) <= len(link.taken):
                return False
            starts = max(starts, link.there[len(link.taken)])
            link.taken.append(starts)
        stage.started.append((unit, starts))
        stage.time = starts + lengths[unit.direction]
        stage.working = True
    to = follower(rank, stages, chunks, unit)
    if to is not None:
        link = links[unit.direction, to[0]]
        waited_for = -1 if outstanding is None else len(link.sent) - outstanding
        if waited_for >= 0:
            link.arrive()
            if len(link.there) <= waited_for:
                return False
            stage.time = max(stage.time, link.there[waited_for])
        link.sent.append(stage.time)
    stage.working = False
    return True
