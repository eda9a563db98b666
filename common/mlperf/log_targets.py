"""What the evaluations of a log had to reach, and which checkpoint of one that is scored offline did so first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from common.mlperf.parsed_log import ParsedLog
from common.mlperf.progress import evaluations_of, is_number
from common.mlperf.rules import Rules, Target


def targets_of(log: ParsedLog, rules: Rules) -> tuple[Target, ...]:
    """Return the rules' targets or, where the data are not the benchmark's, those of the log; empty without any."""
    targets = rules.targets_at(log.global_batch if isinstance(log.global_batch, int) else 0)
    if not log.other_data:
        return targets
    own = log.value("quality_target")
    values = own if isinstance(own, Mapping) else {targets[0].metric: own} if len(targets) == 1 else {}
    if all(is_number(values.get(target.metric)) for target in targets):
        return tuple(Target(float(values[target.metric]), target.direction, target.metric) for target in targets)
    return ()


def checkpoint_scores(log: ParsedLog, rules: Rules) -> dict[float, dict[str, float]]:
    """Progress to the metrics of each checkpoint; several lines may report the metrics of one."""
    stop = next(iter(log.all("run_stop")), None)
    scores: dict[float, dict[str, float]] = {}
    for point in evaluations_of(log, rules):
        if math.isfinite(point.progress) and (stop is None or point.line < stop.line):
            scores.setdefault(point.progress, {}).update(point.values)
    return scores


def first_passing(scores: Mapping[float, Mapping[str, float]], targets: Sequence[Target]) -> float | None:
    """The progress of the first checkpoint that meets all targets; None if none does, or no target is known."""
    passing = [
        at
        for at, found in scores.items()
        if targets and all(target.metric in found and target.met(found[target.metric]) for target in targets)
    ]
    return min(passing, default=None)
