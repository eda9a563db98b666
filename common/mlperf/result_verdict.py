"""Verdicts on the runs of a result: whether they form one, and its score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.mlperf.compliance import rule_records
from common.mlperf.evaluation_points import reported_checkpoints
from common.mlperf.parsed_log import ParsedLog, distinct_names
from common.mlperf.rcp import check_convergence, has_rcps, olympic_mean
from common.mlperf.refusals import Refusal
from common.mlperf.rules import Rules, rules_for
from common.mlperf.run_refusals import set_seed_refusals
from common.mlperf.verdict import KEYS_OF_PROGRESS, Verdict, data_limit

_RUN_KEYS = frozenset({"seed", "train_samples", "init_stop", "run_start", "run_stop"})
"""Keys that occur once in a run and may differ between the runs of a set."""

_MACHINE_KEYS = ("number_of_nodes", "accelerators_per_node", "ruleset", "data_set")
"""Keys that no rule file of training requires, but that must be equal in all runs of a result."""

UNREPORTED_IN = ("4.0.0", "4.1.0", "5.0.0")
"""Rounds in which unreported checkpoints cause only a note: in no published result that we know, a run has all."""


def judge_together(verdicts: Sequence[Verdict], ruleset: str | None) -> Verdict:
    """Judge runs that are meant to form one benchmark result.

    Args:
        verdicts: verdicts on all runs of the result, in launch order.
        ruleset: version that they were judged by; None for the newest that accepts the benchmark.
    """
    paths = tuple(path for verdict in verdicts for path in verdict.paths)
    first = verdicts[0]
    named = distinct_names(paths)
    bad = [verdict for verdict in verdicts if verdict.kind == "refused" and not verdict.cut_short]
    if refused := [each.refusals[0].about(f"{named[each.paths[0]]} is refused: ") for each in bad]:
        return Verdict("refused", tuple(refused), (), first.benchmark, first.ruleset, paths)
    logs = [verdict.log for verdict in verdicts if verdict.log is not None]
    names = sorted({str(log.benchmark) for log in logs})
    if len(names) > 1:
        mixed = Refusal("benchmarks-mixed", f"the logs are of different benchmarks: {', '.join(names)}")
        return Verdict("refused", (mixed,), (), None, ruleset, paths)
    rules = rules_for(names[0], ruleset)
    refusals = _set_refusals(logs, verdicts, rules)
    notes = [*first.notes, *_set_notes(logs, rules)]
    notes += [f"{named[v.paths[0]]} has no run_stop: it counts as a run that failed" for v in verdicts if v.cut_short]
    score: float | None = None
    if not refusals:
        factor, refusals, notes_of_test = rcp_test(logs, rules)
        notes += notes_of_test
        score = factor * olympic_mean([_minutes(v) for v in verdicts], rules.dropped)
    return Verdict(
        "refused" if refusals else "submittable",
        tuple(refusals),
        tuple(notes),
        names[0],
        rules.ruleset,
        paths,
        converged=sum(not v.converged for v in verdicts) <= rules.non_converged,
        score=None if refusals else score,
    )


def _minutes(verdict: Verdict) -> float:
    return float("inf") if verdict.minutes is None else verdict.minutes


def invalid_runs(logs: Sequence[ParsedLog], verdicts: Sequence[Verdict]) -> list[Refusal]:
    """Refuse runs that used other data or did not clear the page cache."""
    found = []
    named = distinct_names([log.path for log in logs])
    for log, verdict in zip(logs, verdicts, strict=True):
        if log.other_data:
            found.append(Refusal("data-synthetic", f"{named[log.path]}: {data_limit(log)}"))
        elif verdict.kind == "format" and (verdict.converged or len(verdict.limits) > 1):
            text = f"{named[log.path]} is not a valid run: {verdict.limits[-1]}"
            found.append(Refusal("cache-not-cleared", text))
    return found


def _set_refusals(logs: Sequence[ParsedLog], verdicts: Sequence[Verdict], rules: Rules) -> list[Refusal]:
    found = invalid_runs(logs, verdicts)
    named = distinct_names([log.path for log in logs])
    failed = [named[v.paths[0]] for v in verdicts if not v.converged]
    if len(failed) > rules.non_converged:
        text = f"{len(failed)} runs did not converge ({', '.join(failed)}); {rules.non_converged} may in a result"
        found.append(Refusal("runs-not-converged", text))
    if len(logs) != rules.runs:
        text = f"a result of {rules.log_name} has exactly {rules.runs} runs, these are {len(logs)}"
        found.append(Refusal("run-count", text))
    if rules.ruleset not in UNREPORTED_IN and _unreported_checkpoints(logs, rules):
        text = "no run reports all checkpoints up to the first that meets the targets"
        found.append(Refusal("checkpoint-unreported", text))
    return [*found, *contradictions(logs, rules)]


def _set_notes(logs: Sequence[ParsedLog], rules: Rules) -> list[str]:
    if rules.ruleset not in UNREPORTED_IN or not _unreported_checkpoints(logs, rules):
        return []
    return ["no run reports all checkpoints up to the first that meets the targets, as the rules ask of one run"]


def _unreported_checkpoints(logs: Sequence[ParsedLog], rules: Rules) -> bool:
    """Return whether any order of scores is allowed, and no run reports all checkpoints up to the first passing one."""
    if not rules.scored_in_any_order or logs[0].division != "closed":
        return False
    reported = [found for log in logs if (found := reported_checkpoints(log, rules)) is not None]
    return bool(reported) and not any(found.all for found in reported)


def contradictions(logs: Sequence[ParsedLog], rules: Rules) -> list[Refusal]:
    """Return why logs cannot be runs of one series: different divisions, equal seeds, or different configurations.

    The open division has no rule on seeds and no list of hyperparameters.
    """
    named = distinct_names([log.path for log in logs])
    if different := _different_values(
        [log for log in logs if log.all("submission_division")], "submission_division", named
    ):
        return [Refusal("division-differs", f"submission_division is {different}")]
    if logs[0].division != "closed":
        return []
    return [*set_seed_refusals(logs), *_differences(logs, rules)]


def _differences(logs: Sequence[ParsedLog], rules: Rules) -> list[Refusal]:
    """Compare the keys that the rule files require exactly once per run, and some others, in all logs."""
    prefix = f"{rules.usage}_{rules.ruleset}"
    records = {
        key: record
        for file in ("common.yaml", "closed_common.yaml", f"closed_{rules.log_name}.yaml")
        for key, record in rule_records(f"{prefix}/{file}").items()
    }
    names = [key for key, record in records.items() if record.get("REQ") == "EXACTLY_ONE"]
    logged = [e.key for log in logs for e in log.events if e.key.startswith(("lars_", "sgd_", "opt_", "scheduler_"))]
    machine = [key for key in _MACHINE_KEYS if any(log.all(key) for log in logs)]
    names = list(dict.fromkeys([*names, "global_batch_size", *machine, *logged]))
    found = []
    named = distinct_names([log.path for log in logs])
    for key in [name for name in names if name not in _RUN_KEYS]:
        # A run that failed may have ended before the event.
        compared = [log for log in logs if log.all(key) or log.status == "success" or key not in KEYS_OF_PROGRESS]
        if different := _different_values(compared, key, named):
            text = f"the runs have different configurations: {key} is {different}"
            found.append(Refusal("configurations-differ", text))
    return found


def _different_values(logs: Sequence[ParsedLog], key: str, named: Mapping[Path, str]) -> str:
    """Return the values of a key in the logs, each with a log and a line; "" if all are equal."""
    values: dict[str, str] = {}
    for log in logs:
        at = next((f", line {event.line}" for event in log.all(key)), "")
        values.setdefault(repr(log.value(key)), named[log.path] + at)
    return ", ".join(f"{value[:80]} in {where}" for value, where in values.items()) if len(values) > 1 else ""


def rcp_test(logs: Sequence[ParsedLog], rules: Rules) -> tuple[float, list[Refusal], tuple[str, ...]]:
    """Return score factor, refusals and notes of the RCP test."""
    if logs[0].division != "closed":
        return 1.0, [], ("open division: convergence is not compared with the reference",)
    if not has_rcps(rules.log_name, rules.ruleset):
        note = f"mlperf-logging cannot test the convergence of {rules.log_name} in {rules.ruleset}: no RCPs"
        return 1.0, [], (note,)
    result = check_convergence(logs, rules.log_name, rules.ruleset)
    if not result.passed:
        return 1.0, [Refusal("convergence-too-fast", f"the RCP test fails: {result.message}")], ()
    return result.factor, [], (f"RCP test passed ({result.message}), score factor {result.factor:.4f}",)
