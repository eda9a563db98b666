"""Find copied runs: logs of one run that appear twice, with another name, seed or date.

Two logs are of one run if they agree in the sequence of evaluation results, in the times of these results to the
millisecond, or in the time gaps between all log lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from common.mlperf.parsed_log import LoggedEvaluation, ParsedLog
from common.mlperf.refusals import Refusal

TELLING_VALUES = 6
"""Smallest number of different evaluation results that identify a run."""
TELLING_GAPS = 10
"""Smallest number of different time gaps between log lines that identify a run."""


def copied_runs(logs: Sequence[ParsedLog]) -> list[tuple[ParsedLog, ParsedLog]]:
    """Return pairs of logs of one run, as (first log, log that repeats it)."""
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
    """Yield fingerprints that do not change if somebody edits seed, date, benchmark name or other lines of a log."""
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


def _values(evaluation: LoggedEvaluation) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in evaluation.values.items()))


def _ms(milliseconds: float) -> float:
    return round(milliseconds, 0)  # stays a float, because times in damaged logs can be infinite
