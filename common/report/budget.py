"""Time budget of a run: divide the time from ``run_start`` to ``run_stop`` into parts, in whole milliseconds.

The log has the start and stop of training blocks and of evaluations. Evaluation time within an open block is *hidden*,
because training continued; the rest is *exposed*. Block time is divided by the measurements of the ranks, averaged over
the ranks because all of them spend the same time in a block::

    run = data wait + communication + compute + evaluation (exposed) + other

Compute is the rest of the block time, so the parts add up to the run exactly.
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
    """Time budget of one run, in milliseconds.

    Attributes:
        init: time from init_start to init_stop, before the clock starts; None if the log has neither.
        run: time from run_start to run_stop.
        data_wait: time that the host waited for data, mean over the ranks; None without metrics.
        communication: exposed communication, mean over the ranks, 0 for a single rank; None if not measured, then it
            is part of ``compute``.
        compute: rest of the training blocks.
        evaluation: exposed evaluation.
        hidden_evaluation: evaluation that overlaps training; not part of the sum.
        other: time outside blocks and evaluations, such as opening the data, checkpoints and closing.
        notes: sentences about missing or imprecise values.
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
        """Milliseconds of each part by name; the parts add up to ``run``."""
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
        """Name of the part ``compute``, which depends on what was measured."""
        if self.data_wait is None:
            return "training, undivided"
        return "compute" if self.communication is not None else "compute and communication"


def budget_of(log: ParsedLog, start: int, stop: int, ranks: Sequence[RankSteps]) -> Budget:
    """Return the time budget of a run.

    Args:
        start, stop: run_start and run_stop in milliseconds since the epoch.
        ranks: steps of each rank; empty without metrics.
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
            "Evaluations inside a training block of the log count as hidden, even if the implementation only left "
            "its block open while it evaluated."
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
    """Return the intervals of training: blocks, else epochs, else all of ``window`` outside evaluations."""
    stop = window[0][1]
    for kind in ("block", "epoch"):
        found = brackets(log, (f"{kind}_start", f"{kind}_stop"), stop)
        if found:
            return found
    bracketed = log.all("block_start") or log.all("epoch_start")
    what = "The blocks of the log have no length" if bracketed else "The log has no blocks and no epochs"
    notes.append(f"{what}. All time outside of evaluations counts as training.")
    return _without(window, evaluations)


def _measured(ranks: Sequence[RankSteps], training: int, notes: list[str]) -> tuple[int | None, int | None]:
    """Return data wait and exposed communication, means over the ranks, together at most ``training``."""
    if not ranks:
        notes.append("Without metrics_rank*.jsonl, the time of training cannot be divided further.")
        return None, None
    data_wait = min(training, round(_mean_sum(ranks, "data_wait_ms")))
    notes.append(
        "Data wait: time in which the host waited for data, mean over the ranks. A GPU may still compute earlier steps "
        "during this time, so the lost time is at most this long."
    )
    if len(ranks) == 1 and not ranks[0].has("comm_wait_ms"):
        return data_wait, 0
    if not all(rank.has("comm_wait_ms") for rank in ranks):
        notes.append("Exposed communication was not measured in this run. It is part of compute.")
        return data_wait, None
    return data_wait, min(training - data_wait, round(_mean_sum(ranks, "comm_wait_ms")))


def _mean_sum(ranks: Sequence[RankSteps], name: str) -> float:
    return float(np.mean([np.nansum(np.maximum(rank[name], 0)) for rank in ranks]))


def brackets(log: ParsedLog, keys: tuple[str, str], stop: int) -> list[Interval]:
    """Return the union of the intervals between start and stop events.

    Each stop event closes the oldest open start. An interval that is never closed ends at ``stop``.
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
    """Return the intersection of two unions of intervals."""
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
    """Return the part of the union ``one`` that is not in the union ``other``."""
    edges = [edge for interval in other for edge in interval]
    bounds = [min((begin for begin, _ in one), default=0), *edges, max((end for _, end in one), default=0)]
    gaps = list(zip(bounds[::2], bounds[1::2], strict=True))
    return _overlap(one, [gap for gap in gaps if gap[0] < gap[1]])


def _length(intervals: Sequence[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)
