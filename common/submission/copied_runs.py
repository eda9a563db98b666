"""One run given out as two: a log copied under another name, seed or date.

Two runs never agree to the millisecond in when they evaluated, and in what they got; nor in the times between all that
they logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from common.mlperf.parsed_log import Evaluation, ParsedLog
from common.mlperf.refusals import Refusal

TELLING_VALUES = 6
"""Different values that a curve must have for it to be its run's alone."""
TELLING_GAPS = 10
"""Different times between two lines that a log must have for their sequence to be its run's alone."""


def copied_runs(logs: Sequence[ParsedLog]) -> list[tuple[ParsedLog, ParsedLog]]:
    """Pairs of logs that are one run, each log with the first that it repeats."""
    first: dict[tuple[object, ...], ParsedLog] = {}
    found = []
    for log in logs:
        marks = list(_marks(log))
        owner = next((first[mark] for mark in marks if mark in first), None)
        if owner is not None:
            found.append((owner, log))
        for mark in marks:
            first.setdefault(mark, log)
    return found


def copy_refusals(logs: Sequence[ParsedLog]) -> list[Refusal]:
    """Return a refusal for each pair of :func:`copied_runs`."""
    return [
        Refusal(
            "run-copied",
            f"{copy.path} and {owner.path} are one run: their evaluations or times agree to the millisecond; a result "
            "counts each run once",
        )
        for owner, copy in copied_runs(logs)
    ]


def _marks(log: ParsedLog) -> Iterator[tuple[object, ...]]:
    """What identifies a run, whatever its seed, its date, its benchmark's name and the rest of its lines."""
    starts = log.all("run_start")
    values = tuple((repr(each.progress), _values(each)) for each in log.evaluations)
    if len({value for _, value in values}) >= TELLING_VALUES:
        yield ("values", values)
    if starts and log.evaluations:
        curve = [
            (repr(each.progress), _values(each), _ms(each.time_ms - starts[0].time_ms)) for each in log.evaluations
        ]
        length = None if log.run_minutes is None else _ms(60_000 * log.run_minutes)
        yield ("curve", tuple(curve), length)
    gaps = tuple(_ms(after.time_ms - before.time_ms) for before, after in pairwise(log.events))
    if len(set(gaps)) >= TELLING_GAPS:
        yield ("gaps", gaps)


def _values(evaluation: Evaluation) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in evaluation.values.items()))


def _ms(milliseconds: float) -> float:
    return round(milliseconds, 0)  # a float: times of damaged logs may be infinitely far apart
