"""Refusals of one log that the compliance checker does not find: its end, seeds, evaluations and success."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from common.mlperf.constraints import hyperparameter_complaints, infinite_hyperparameters, is_hyperparameter
from common.mlperf.evaluation_points import FURTHEST, reported_checkpoints
from common.mlperf.parsed_log import Event, ParsedLog, distinct_names, evaluation_of
from common.mlperf.progress import OLD_RULESETS, evaluations_of
from common.mlperf.refusals import Refusal
from common.mlperf.rules import Rules, version_key

NOT_CLEARED = (False, 0, "false", "no", "0")
"""Values of cache_clear, in lower case, for a page cache that was not cleared."""


def run_refusals(log: ParsedLog) -> list[Refusal]:
    """Refuse a run that was resumed, does not have exactly one start and one stop, or has an unknown status."""
    found = []
    if log.resumed:
        found.append(Refusal("run-resumed", "the run was resumed (resumed_from): a resumed run is not scored"))
    for key in ("run_start", "run_stop"):
        events = log.all(key)
        if len(events) > 1:
            lines = ", ".join(str(event.line) for event in events)
            text = f"{key} occurs {len(events)} times (lines {lines}): a log holds one run"
            found.append(Refusal("run-incomplete", text))
        if not events:
            found.append(Refusal("run-incomplete", f"there is no {key}: the run was cut short"))
    if log.all("run_stop") and log.status not in ("success", "aborted"):
        shown = json.dumps(log.status)[:80]
        text = f"run_stop in line {log.all('run_stop')[-1].line} has the status {shown}: success or aborted"
        found.append(Refusal("run-status", text))
    return found


def cache_refusals(log: ParsedLog) -> list[Refusal]:
    """Refuse a log whose page cache was cleared only after ``run_start``, according to the event times."""
    starts, clears = log.all("run_start"), log.all("cache_clear")
    if not starts or not clears or any(clear.time_ms <= starts[0].time_ms for clear in clears):
        return []
    text = f"line {clears[0].line}: the page cache was cleared after run_start in line {starts[0].line}"
    return [Refusal("cache-cleared-late", text)]


def cache_cleared(values: Sequence[Any]) -> bool | None:
    """Return whether logged ``values`` say that the page cache was cleared: False if one denies it, None if unsaid."""
    stated = [value.strip().casefold() if isinstance(value, str) else value for value in values]
    if any(value in NOT_CLEARED for value in stated if isinstance(value, str | bool | int | float)):
        return False
    return True if any(value in (True, 1) for value in stated if isinstance(value, bool | int | float)) else None


def seed_refusals(log: ParsedLog, rules: Rules) -> list[Refusal]:
    """Check the rules on seeds. MLCommons' package checker enforces them; its compliance checker does not."""
    if log.division != "closed" or rules.ruleset == "0.7.0":
        return []
    if not log.seeds:
        return [Refusal("seed-missing", "no seed is logged")] if _seeds_required(rules) else []
    logged = list(zip(log.all("seed"), log.seeds, strict=True))
    wrong = [event for event, (_, _, seed) in logged if isinstance(seed, bool) or not isinstance(seed, int)]
    if wrong:
        texts = (f"line {event.line}: seed {json.dumps(event.value)[:80]} is not an integer" for event in wrong)
        return [Refusal("seed-not-integer", text) for text in texts]
    lines: dict[str, int] = {}
    for event, seed in logged:
        if (line := lines.setdefault(repr(seed), event.line)) != event.line:
            text = (
                f"the seed {event.value} is logged twice from one source line (lines {line} and {event.line}), which "
                "the seed checker takes for two runs: only one rank, through one handler, may write the log"
            )
            return [Refusal("seed-repeated", text)]
    return []


def seed_notes(log: ParsedLog, rules: Rules) -> list[str]:
    """Return a note on a closed log that has no seed and needs none under its ruleset."""
    if log.seeds or _seeds_required(rules) or rules.ruleset == "0.7.0":
        return []
    return ["no seed is logged: the rules allow this up to v4.0, but the package checker of today refuses the result"]


def _seeds_required(rules: Rules) -> bool:
    """Return whether each closed run has to log a seed (pull request 547 of mlcommons/training_policies)."""
    return version_key(rules.ruleset) >= (4, 1)


def set_seed_refusals(logs: Sequence[ParsedLog]) -> list[Refusal]:
    """Refuse equal seeds in the runs of a result, and a run without a seed if another run has one."""
    owner: dict[str, str] = {}
    found = []
    named = distinct_names([log.path for log in logs])
    for log in logs:
        for key, (_, _, seed) in {repr(seed): seed for seed in log.seeds}.items():
            if key in owner:
                text = f"{owner[key]} and {named[log.path]} have the same seed {json.dumps(seed)[:80]}"
                found.append(Refusal("seed-repeated", text))
            owner[key] = named[log.path]
    if owner:
        without = (named[log.path] for log in logs if not log.seeds)
        found += [Refusal("seed-missing", f"{name} logs no seed, and other runs of the result do") for name in without]
    return found


def evaluation_refusals(log: ParsedLog, rules: Rules) -> list[Refusal]:
    """Refuse evaluations whose quality or progress is not a number, because the checkers crash on them."""
    found = []
    for event in log.all(rules.quality_key):
        progress = event.metadata.get(rules.progress_key, None if log.division == "closed" else 0)
        where = f"of the {rules.quality_key} in line {event.line}"
        if evaluation_of(event) is None:
            text = f"the value {where} is {json.dumps(event.value)[:80]}, not a number"
            found.append(Refusal("evaluation-no-number", text))
        if isinstance(progress, bool) or not isinstance(progress, int | float) or not math.isfinite(progress):
            text = f"{rules.progress_key} {where} is {json.dumps(progress)[:80]}, not a number"
            found.append(Refusal("evaluation-no-number", text))
        elif not 0 <= progress < FURTHEST:
            found.append(Refusal("count-invalid", f"{rules.progress_key} {where} is {progress!r}, which is impossible"))
    return found


def backward_refusals(log: ParsedLog, rules: Rules) -> list[Refusal]:
    """Refuse an evaluation with less progress than the previous one, or with the same after a block of training.

    Equal progress is allowed for fractions of epochs (rounding) and up to v1.1 (logs of BERT always state epoch 1).
    """
    if rules.scored_in_any_order:
        return []
    stops = [event.line for event in log.all("block_stop")]
    grows = rules.unit != "epoch fraction" and rules.ruleset not in OLD_RULESETS
    for before, after in pairwise(evaluations_of(log, rules)):
        trained = bisect_left(stops, before.line) < bisect_left(stops, after.line)
        if after.progress < before.progress:
            how = "progress goes backwards"
        elif grows and trained and after.progress == before.progress:
            how = "a block of training between them ends without progress"
        else:
            continue
        text = (
            f"line {after.line}: an evaluation after {rules.progress_key} {after.progress:g} follows one after "
            f"{before.progress:g}: {how}"
        )
        return [Refusal("progress-backwards", text)]
    return []


def success_refusals(log: ParsedLog, rules: Rules) -> list[Refusal]:
    """Refuse a success whose last evaluation missed the target. The RCP checker uses this evaluation.

    With offline scoring, refuse it if the checkpoint before the first passing one is not reported.
    """
    stop = log.all("run_stop")[0]
    before = [e for e in log.events if e.key == rules.quality_key and e.line < stop.line]
    if not before:
        return [Refusal("evaluation-missing", f"run_stop claims success before any {rules.quality_key}")]
    if rules.progress_key not in before[-1].metadata:
        text = f"the {rules.quality_key} of line {before[-1].line} lacks {rules.progress_key} in its metadata"
        return [Refusal("evaluation-missing", text)]
    if rules.scored_in_any_order:  # the checker looks for a checkpoint that passes
        return _checkpoint_refusals(log, rules)
    batch = log.global_batch if isinstance(log.global_batch, int) else 0
    evaluation = evaluation_of(before[-1])
    if evaluation is not None and rules.meets_target(evaluation.values, batch):
        return []
    text = (
        f"line {stop.line}: run_stop claims success, but the last {rules.quality_key} before it, in line "
        f"{before[-1].line}, misses the target"
    )
    return [Refusal("target-missed", text)]


def _checkpoint_refusals(log: ParsedLog, rules: Rules) -> list[Refusal]:
    """Check that the checkpoint before the first passing one was scored too."""
    reported = reported_checkpoints(log, rules)
    if reported is None or reported.before:
        return []
    text = (
        f"the checkpoint before the first that meets the targets, at {rules.progress_key} {reported.passed:.10g}, is "
        "not reported"
    )
    return [Refusal("checkpoint-unreported", text)]


def text_rule_refusals(log: ParsedLog, rules: Rules) -> list[Refusal]:
    """Refuse hyperparameters that are not finite or that the rules' table forbids."""
    first: dict[str, Event] = {}
    for event in log.events:
        first.setdefault(event.key, event)
    values = {key: event.value for key, event in first.items()}
    found = _forbidden(rules, values, first)
    seen = {(key, repr(value)) for key, value in values.items()}
    for event in log.events:  # a key may be logged several times, with different values
        if is_hyperparameter(event.key, rules) and (event.key, repr(event.value)) not in seen:
            seen.add((event.key, repr(event.value)))
            found += _forbidden(rules, {**values, event.key: event.value}, {event.key: event})
    return found


def _forbidden(rules: Rules, values: Mapping[str, object], events: Mapping[str, Event]) -> list[Refusal]:
    """Return the complaints about keys of ``values`` that are also in ``events``, each with the line of its event."""
    infinite = infinite_hyperparameters(rules, values)
    return [
        Refusal("not-finite" if key in infinite else "hyperparameter-rule", f"line {events[key].line}: {complaint}")
        for key, complaint in hyperparameter_complaints(rules, values).items()
        if key in events
    ]
