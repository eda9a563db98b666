"""Whether the evaluations in a log fall where the rules want them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from common.mlperf.parsed_log import ParsedLog
from common.mlperf.rules import Rules
from common.mlperf.schedules import SCHEDULES, Schedule


def _resnet(global_batch: int, first: int, unit: str) -> Schedule:
    return SCHEDULES["resnet"](global_batch, first_epoch=first)


def _every_epoch(global_batch: int, first: int, unit: str) -> Schedule:
    """Every epoch from the first evaluation on: leaving out early ones gains nothing."""
    return Schedule(first, 1, None, "epoch")


def _unet3d(global_batch: int, first: int, unit: str) -> Schedule:
    """In epochs of whole batches, or in their samples, as the ruleset's reference points are."""
    schedule = SCHEDULES["unet3d"](global_batch)
    size = schedule.epoch_samples if unit == "samples" else 1
    assert size is not None
    return Schedule(schedule.first * size, schedule.interval * size, None, "samples")


OF_A_LOG: dict[str, Callable[[int, int, str], Schedule]] = {
    "resnet": _resnet,
    "retinanet": _every_epoch,
    "maskrcnn": _every_epoch,
    "rnnt": _every_epoch,
    "cosmoflow": _every_epoch,
    "unet3d": _unet3d,
}
"""Benchmark to its schedule from the global batch and the first evaluation of a log, and the unit that it counts in.

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
        schedule = OF_A_LOG[rules.benchmark](log.global_batch, int(points[0]), rules.unit)
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
