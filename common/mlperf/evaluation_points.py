"""Whether the evaluations in a log fall where the rules want them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from common.mlperf.parsed_log import ParsedLog
from common.mlperf.rules import Rules
from common.mlperf.schedules import SCHEDULES, Schedule


def _resnet(global_batch: int, first: int) -> Schedule:
    return SCHEDULES["resnet"](global_batch, first_epoch=first)


OF_A_LOG: dict[str, Callable[[int, int], Schedule]] = {"resnet": _resnet}
"""Benchmark to its schedule from the global batch and the first evaluation of a log.

Only benchmarks whose logs say exactly when they evaluated; those that count samples round to batches in several ways.
"""


def misplaced_evaluations(log: ParsedLog, rules: Rules) -> list[str]:
    """What is wrong with the evaluation points of a log, in plain sentences; empty where nothing can be said."""
    if rules.benchmark not in OF_A_LOG or not isinstance(log.global_batch, int):
        return []
    points = [point.progress for point in log.evaluations if point.progress_key == rules.progress_key]
    if not points:
        return []
    if any(not point.is_integer() for point in points):
        return [f"evaluations after {_listed(points)}: {rules.progress_key} is a whole number"]
    try:
        schedule = OF_A_LOG[rules.benchmark](log.global_batch, int(points[0]))
    except ValueError as error:
        return [f"the first evaluation breaks the rules' schedule: {error}"]
    wanted = [float(point) for point in islice(schedule.points(), len(points))]
    if points == wanted:
        return []
    return [
        f"evaluations after {rules.progress_key} {_listed(points)} are not the rules' schedule: from the first on "
        f"every {schedule.interval}, {_listed(wanted)}"
    ]


def _listed(points: list[float]) -> str:
    return ", ".join(f"{point:g}" for point in points)
