"""Quality targets of a log, and the first offline-scored checkpoint that meets them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from common.mlperf.parsed_log import ParsedLog
from common.mlperf.progress import evaluations_of, is_number
from common.mlperf.rules import Rules, Target


def targets_of(log: ParsedLog, rules: Rules) -> tuple[Target, ...]:
    """Return the targets of the rules, or those that the log states if it uses other data. Empty if it states none."""
    targets = rules.targets_at(log.global_batch if isinstance(log.global_batch, int) else 0)
    if not log.other_data:
        return targets
    own = log.value("quality_target")
    values = own if isinstance(own, Mapping) else {targets[0].metric: own} if len(targets) == 1 else {}
    if all(is_number(values.get(target.metric)) for target in targets):
        return tuple(Target(float(values[target.metric]), target.direction, target.metric) for target in targets)
    return ()


def checkpoint_scores(log: ParsedLog, rules: Rules) -> dict[float, dict[str, float]]:
    """Map the progress of each checkpoint to its metrics. Several lines may report the metrics of one checkpoint."""
    stop = next(iter(log.all("run_stop")), None)
    scores: dict[float, dict[str, float]] = {}
    for point in evaluations_of(log, rules):
        if math.isfinite(point.progress) and (stop is None or point.line < stop.line):
            scores.setdefault(point.progress, {}).update(point.values)
    return scores


def first_passing(scores: Mapping[float, Mapping[str, float]], targets: Sequence[Target]) -> float | None:
    """Return the progress of the first checkpoint that meets all targets; None without such a checkpoint or targets."""
    passing = [
        at
        for at, found in scores.items()
        if targets and all(target.metric in found and target.met(found[target.metric]) for target in targets)
    ]
    return min(passing, default=None)
