"""What is wrong with one run's log beyond what the compliance checker tests: ends, seeds, evaluations, success."""

from __future__ import annotations

import json
import math
from itertools import pairwise

from common.mlperf.constraints import hyperparameter_complaints
from common.mlperf.evaluation_points import reported_checkpoints
from common.mlperf.parsed_log import ParsedLog, evaluation_of
from common.mlperf.progress import evaluations_of
from common.mlperf.rules import Rules


def run_complaints(log: ParsedLog) -> list[str]:
    """What is wrong with the run as a whole: resumed, started or stopped more than once, without a clear end."""
    complaints = []
    if log.resumed:
        complaints.append("the run was resumed (resumed_from): a resumed run is not scored")
    for key in ("run_start", "run_stop"):
        events = log.all(key)
        if len(events) > 1:
            lines = ", ".join(str(event.line) for event in events)
            complaints.append(f"{key} occurs {len(events)} times (lines {lines}): a log holds one run")
        if not events:
            complaints.append(f"there is no {key}: the run was cut short")
    if log.all("run_stop") and log.status not in ("success", "aborted"):
        shown = json.dumps(log.status)[:80]
        complaints.append(f"run_stop in line {log.all('run_stop')[-1].line} has the status {shown}: success or aborted")
    return complaints


def seed_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """The rule on seeds, which the compliance checker leaves to the package checker."""
    if log.division != "closed" or rules.ruleset == "0.7.0":
        return []
    if not log.seeds:
        return ["no seed is logged; the closed division requires one"]
    wrong = [event for event in log.all("seed") if isinstance(event.value, bool) or not isinstance(event.value, int)]
    if wrong:
        return [f"line {event.line}: seed {json.dumps(event.value)[:80]} is not an integer" for event in wrong]
    places: dict[str, int] = {}
    for event, seed in zip(log.all("seed"), log.seeds, strict=True):
        if (line := places.setdefault(repr(seed), event.line)) != event.line:
            return [
                f"the seed {event.value} is logged twice from one place (lines {line} and {event.line}): the seed "
                "checker takes it for two runs; let one rank, and one handler, write the log"
            ]
    return []


def evaluation_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """Evaluations that are no numbers: the checkers die of them, or of a progress that is no number."""
    complaints = []
    for event in log.all(rules.quality_key):
        progress = event.metadata.get(rules.progress_key, None if log.division == "closed" else 0)
        where = f"of the {rules.quality_key} in line {event.line}"
        if evaluation_of(event) is None:
            complaints.append(f"the value {where} is {json.dumps(event.value)[:80]}, not a number")
        if isinstance(progress, bool) or not isinstance(progress, int | float) or not math.isfinite(progress):
            complaints.append(f"{rules.progress_key} {where} is {json.dumps(progress)[:80]}, not a number")
    return complaints


def backward_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """Evaluations after less training than the one before: events of another run, or written by hand."""
    if rules.scored_offline:  # in any order
        return []
    points = evaluations_of(log, rules)
    for before, after in pairwise(points):
        if after.progress < before.progress:
            return [
                f"line {after.line}: an evaluation after {rules.progress_key} {after.progress:g} follows one after "
                f"{before.progress:g}: progress goes backwards"
            ]
    return []


def success_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """Whether the evaluation that the RCP checker takes as the convergence, the last before run_stop, converged."""
    stop = log.all("run_stop")[0]
    before = [e for e in log.events if e.key == rules.quality_key and e.line < stop.line]
    if not before:
        return [f"run_stop claims success before any {rules.quality_key}"]
    if rules.progress_key not in before[-1].metadata:
        return [f"the {rules.quality_key} of line {before[-1].line} lacks {rules.progress_key} in its metadata"]
    if rules.scored_offline:  # the checker looks for a checkpoint that passes
        return _checkpoint_complaints(log, rules)
    batch = log.global_batch if isinstance(log.global_batch, int) else 0
    evaluation = evaluation_of(before[-1])
    if evaluation is not None and rules.meets_target(evaluation.values, batch):
        return []
    return [
        f"line {stop.line}: run_stop claims success, but the last {rules.quality_key} before it, in line "
        f"{before[-1].line}, misses the target"
    ]


def _checkpoint_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """Whether the checkpoint before the first that passes was scored too (rules, section on the benchmark)."""
    reported = reported_checkpoints(log, rules)
    if reported is None or reported.before:
        return []
    return [
        f"the checkpoint before the first that meets the targets, at {rules.progress_key} {reported.passed:.10g}, is "
        "not reported: the rules want its evaluation too"
    ]


def text_rule_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """Hyperparameters that the rules' own table forbids and the compliance checker does not test."""
    first = {event.key: event.value for event in reversed(log.events)}
    return [
        f"line {log.all(key)[0].line}: {complaint}"
        for key, complaint in hyperparameter_complaints(rules, first).items()
    ]
