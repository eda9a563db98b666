"""Where a run's time went: a partition of the time from ``run_start`` to ``run_stop``, in whole milliseconds.

The log's brackets say when a training block was open and when an evaluation ran. What of an evaluation falls into an
open block is *hidden*: training went on. The rest of it is *exposed*. The time of open blocks is then divided by what
the ranks measured, averaged over them, since every rank spends the same time in a block::

    run = data wait + communication + compute + evaluation (exposed) + other

Compute is what is left of the blocks, so that the parts add up to the run exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.mlperf.parsed_log import ParsedLog
from common.report.steps import RankSteps

Interval = tuple[int, int]


@dataclass(frozen=True)
class Budget:
    """Milliseconds of one run.

    Attributes:
        init: from init_start to init_stop, before the clock; None where the log does not say.
        run: from run_start to run_stop.
        data_wait: mean over the ranks of the time that the host waited for data; None without metrics.
        communication: mean over the ranks of exposed communication, 0 for a single rank; None where it was not
            measured, and part of ``compute`` then.
        compute: the rest of the training blocks.
        evaluation: exposed.
        hidden_evaluation: what overlaps training; not a part of the sum.
        other: between blocks and evaluations: opening the data, checkpoints at their ends, closing.
        notes: what is not known, in sentences.
    """

    init: int | None
    run: int
    data_wait: int | None
    communication: int | None
    compute: int
    evaluation: int
    hidden_evaluation: int
    other: int
    notes: tuple[str, ...]

    @property
    def parts(self) -> dict[str, int]:
        """Name to milliseconds of the parts that add up to ``run``."""
        named = {
            "data wait": self.data_wait,
            "communication": self.communication,
            self.compute_name: self.compute,
            "evaluation": self.evaluation,
            "other": self.other,
        }
        return {
            name: value for name, value in named.items() if value is not None and (value or name != "communication")
        }

    @property
    def compute_name(self) -> str:
        """What ``compute`` holds, in words."""
        if self.data_wait is None:
            return "training, undivided"
        return "compute" if self.communication is not None else "compute and communication"


def budget_of(log: ParsedLog, start: int, stop: int, ranks: Sequence[RankSteps]) -> Budget:
    """The budget of a run.

    Args:
        log: of the run.
        start, stop: of the clock, milliseconds since the epoch.
        ranks: steps of its ranks; empty without metrics.
    """
    notes: list[str] = []
    window = [(start, max(start, stop))]
    run = _length(window)
    evaluations = _overlap(brackets(log, ("eval_start", "eval_stop"), stop), window)
    blocks = _overlap(_training(log, evaluations, window, notes), window)
    training = _length(blocks)
    hidden = _length(_overlap(blocks, evaluations))
    exposed = _length(evaluations) - hidden
    if hidden and not ranks:
        notes.append(
            "evaluations that the log brackets within a training block count as hidden; an implementation that "
            "leaves its block open while it evaluates looks the same"
        )
    data_wait, communication = _measured(ranks, training, notes)
    minutes = log.init_minutes
    return Budget(
        init=None if minutes is None else round(minutes * 60_000),
        run=run,
        data_wait=data_wait,
        communication=communication,
        compute=training - (data_wait or 0) - (communication or 0),
        evaluation=exposed,
        hidden_evaluation=hidden,
        other=run - training - exposed,
        notes=tuple(notes),
    )


def _training(log: ParsedLog, evaluations: list[Interval], window: list[Interval], notes: list[str]) -> list[Interval]:
    """When a training block, or an epoch in a log without blocks, was open."""
    stop = window[0][1]
    for kind in ("block", "epoch"):
        found = brackets(log, (f"{kind}_start", f"{kind}_stop"), stop)
        if found:
            return found
    bracketed = log.all("block_start") or log.all("epoch_start")
    what = "the log's blocks have no length" if bracketed else "the log brackets neither blocks nor epochs"
    notes.append(f"{what}: all time outside of evaluations counts as training")
    return _without(window, evaluations)


def _measured(ranks: Sequence[RankSteps], training: int, notes: list[str]) -> tuple[int | None, int | None]:
    """Data wait and exposed communication, means over the ranks, never more than the training they are part of."""
    if not ranks:
        notes.append("without metrics_rank*.jsonl the time of the training blocks cannot be divided")
        return None, None
    data_wait = min(training, round(_mean_sum(ranks, "data_wait_ms")))
    notes.append(
        "data wait is the host's, averaged over the ranks; while it waits, a GPU may still be busy with the steps "
        "before, so that it is an upper bound of the time lost"
    )
    if len(ranks) == 1 and not ranks[0].has("comm_wait_ms"):
        return data_wait, 0
    if not all(rank.has("comm_wait_ms") for rank in ranks):
        notes.append("exposed communication was not measured in this run: it is part of compute")
        return data_wait, None
    return data_wait, min(training - data_wait, round(_mean_sum(ranks, "comm_wait_ms")))


def _mean_sum(ranks: Sequence[RankSteps], name: str) -> float:
    return float(np.mean([np.nansum(np.maximum(rank[name], 0)) for rank in ranks]))


def brackets(log: ParsedLog, keys: tuple[str, str], stop: int) -> list[Interval]:
    """The union of the intervals between starts and stops, each stop closing the oldest open start.

    What is open at the end lasts until ``stop``.
    """
    opened: list[int] = []
    found: list[Interval] = []
    for event in log.events:
        if event.key == keys[0]:
            opened.append(round(event.time_ms))
        elif event.key == keys[1] and opened:
            found.append((opened.pop(0), round(event.time_ms)))
    return _union([*found, *((begin, stop) for begin in opened)])


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What two unions have in common."""
    common: list[Interval] = []
    first = second = 0
    while first < len(one) and second < len(other):
        begin = max(one[first][0], other[second][0])
        end = min(one[first][1], other[second][1])
        if begin < end:
            common.append((begin, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return common


def _without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What of a union is not in another."""
    edges = [edge for interval in other for edge in interval]
    bounds = [min((begin for begin, _ in one), default=0), *edges, max((end for _, end in one), default=0)]
    gaps = list(zip(bounds[::2], bounds[1::2], strict=True))
    return _overlap(one, [gap for gap in gaps if gap[0] < gap[1]])


def _length(intervals: Sequence[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)
