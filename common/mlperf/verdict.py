"""What a log may claim: the verdict of one run's log, and that of a set of runs.

Four verdicts, from the least to the most: *refused*, with the reasons; *format*, the keys are right and nothing else
is claimed (all that stand-in data or a run below its target can earn); *valid run*, one run that could be part of a
result; *submittable*, a full set of runs under one ruleset that accepts the benchmark. Nothing here is verified by
MLCommons Association.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import ConfigError, DataError, SuiteError
from common.mlperf.compliance import Finding, check_file, rule_records
from common.mlperf.evaluation_points import misplaced_evaluations
from common.mlperf.parsed_log import Event, ParsedLog, evaluation_of, read_log
from common.mlperf.rcp import check_convergence, has_rcps, olympic_mean
from common.mlperf.rules import RULESETS, Rules, rules_for

VerdictKind = Literal["refused", "format", "valid run", "submittable"]

NOT_A_RESULT = "not an MLPerf result of any division"
UNVERIFIED = "unverified: not verified by MLCommons Association"

_RUN_KEYS = frozenset({"seed", "train_samples", "init_stop", "run_start", "run_stop"})
"""Keys that occur once in a run and may differ between the runs of a set."""


@dataclass(frozen=True)
class Verdict:
    """What a log, or a set of logs, may claim.

    Attributes:
        kind: the verdict.
        reasons: plain sentences: why it is refused, or why it is no more than it is.
        notes: plain sentences that do not change the verdict.
        benchmark: name in the logs; None if there is none.
        ruleset: version that it was judged by; None if it came to none.
        paths: the logs.
        converged: whether the run, or every run that must, reached the target.
        score: minutes: the run's time, or the set's olympic mean with the RCP factor; None if there is none.
    """

    kind: VerdictKind
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    benchmark: str | None
    ruleset: str | None
    paths: tuple[Path, ...]
    converged: bool = False
    score: float | None = None


def judge(path: Path, ruleset: str | None = None) -> Verdict:
    """Judge the log of one run, written by this suite or not.

    Args:
        path: the log.
        ruleset: version to judge by; None for the newest that accepts the log's benchmark.

    Raises:
        ConfigError: if ``ruleset`` is not a version that the suite knows.
    """
    _require_known(ruleset)
    try:
        log = read_log(path)
    except DataError as error:
        return Verdict("refused", (str(error),), (), None, ruleset, (path,))
    try:
        rules = rules_for(_log_name(log), ruleset)
        _require_log_name(log, rules)
    except ConfigError as error:
        return Verdict("refused", (str(error),), (), log.benchmark, ruleset, (path,))
    return _judge_parsed(log, rules)


def _require_known(ruleset: str | None) -> None:
    if ruleset is not None and not any(ruleset in versions for versions in RULESETS.values()):
        raise ConfigError(f"ruleset {ruleset!r} is not known; known are {', '.join(RULESETS['training'])}")


def _log_name(log: ParsedLog) -> str:
    name = log.benchmark
    if not isinstance(name, str):
        raise ConfigError(f"{log.path}: the log does not name its benchmark (submission_benchmark)")
    return name


def _require_log_name(log: ParsedLog, rules: Rules) -> None:
    if rules.log_name != log.benchmark:
        raise ConfigError(
            f"ruleset {rules.ruleset} does not accept the name {log.benchmark}; there it is {rules.log_name}"
        )


def _judge_parsed(log: ParsedLog, rules: Rules) -> Verdict:
    findings = check_file(log.path, rules.usage, rules.ruleset)
    refusals = [*_run_complaints(log), *_seed_complaints(log, rules)]
    below: list[str] = []
    notes: list[str] = []
    tolerated: list[Finding] = []
    for finding in findings:
        if finding.kind == "target":
            below.append(finding.sentence())
        elif log.stand_in and _is_value_rule(finding):
            tolerated.append(finding)
        else:
            refusals.append(finding.sentence())
    if log.division == "closed" and not log.stand_in:
        refusals += misplaced_evaluations(log, rules)
    success = log.status == "success"
    if success and not below and not refusals and log.division == "closed":
        refusals += _success_complaints(log, rules)
    if success and below and not log.stand_in:
        refusals += [f"run_stop claims success, but {below[0]}"]
    if rules.retired:
        notes.append(f"{rules.log_name} cannot be submitted: last round {rules.last_round}")

    limits: list[str] = []
    if log.stand_in:
        limits.append(f"the data are a stand-in: {NOT_A_RESULT}")
        notes += [f"on real data this would be refused: {finding.sentence()}" for finding in tolerated]
    if not success and not refusals:
        limits.append(f"the run did not reach the target (status {log.status})")
    if not log.stand_in and not any(event.value for event in log.all("cache_clear")):
        limits.append("the page cache was not cleared before the run (cache_clear is false)")
    kind: VerdictKind = "refused" if refusals else "format" if limits else "valid run"
    return Verdict(
        kind,
        tuple(refusals or limits),
        tuple(notes),
        log.benchmark,
        rules.ruleset,
        (log.path,),
        converged=success and not below,
        score=log.run_minutes,
    )


def _is_value_rule(finding: Finding) -> bool:
    """Whether the finding is about a value that a benchmark fixes, not about the form of the log."""
    file = finding.rule_file.rpartition("/")[2]
    return (
        finding.kind == "check"
        and file not in ("common.yaml", "closed_common.yaml", "open_common.yaml")
        and "metadata" not in finding.test
    )


def _run_complaints(log: ParsedLog) -> list[str]:
    """What is wrong with the run as a whole: resumed, started or stopped more than once, without a clear end."""
    complaints = []
    if log.resumed:
        complaints.append("the run was resumed (resumed_from): a resumed run is not scored")
    for key in ("run_start", "run_stop"):
        events = log.all(key)
        if len(events) > 1 and not (log.benchmark == "stable_diffusion" and _same(events)):
            lines = ", ".join(str(event.line) for event in events)
            complaints.append(f"{key} occurs {len(events)} times (lines {lines}): a log holds one run")
        if not events:
            complaints.append(f"there is no {key}: the run was cut short")
    if log.all("run_stop") and log.status not in ("success", "aborted"):
        complaints.append(f"run_stop has the status {log.status!r}; it must be success or aborted")
    minutes = log.run_minutes
    if minutes is not None and minutes < 0:
        complaints.append(f"run_stop is {-minutes:.2f} minutes earlier than run_start")
    return complaints


def _same(events: Sequence[Event]) -> bool:
    first = events[0]
    return all(event.time_ms == first.time_ms and event.metadata == first.metadata for event in events)


def _seed_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """The rule on seeds, which the compliance checker leaves to the package checker."""
    if log.division != "closed" or rules.ruleset == "0.7.0":
        return []
    if not log.seeds:
        return ["no seed is logged; the closed division requires one"]
    wrong = [seed for _, _, seed in log.seeds if isinstance(seed, bool) or not isinstance(seed, int)]
    return [f"seed {seed!r} is not an integer" for seed in wrong]


def _success_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """Whether the evaluation that the RCP checker takes as the convergence, the last before run_stop, converged."""
    stop = log.all("run_stop")[0]
    before = [e for e in log.events if e.key == rules.quality_key and e.line < stop.line]
    if not before:
        return [f"run_stop claims success before any {rules.quality_key}"]
    if rules.progress_key not in before[-1].metadata:
        return [f"the {rules.quality_key} of line {before[-1].line} lacks {rules.progress_key} in its metadata"]
    if rules.benchmark == "stable_diffusion":
        return []  # judged by the checker over all checkpoints: FID and CLIP are separate lines
    batch = log.global_batch if isinstance(log.global_batch, int) else 0
    evaluation = evaluation_of(before[-1])
    if evaluation is not None and rules.target_met(evaluation.values, batch):
        return []
    return [f"run_stop claims success, but the last {rules.quality_key} before it misses the target"]


def judge_set(paths: Sequence[Path], ruleset: str | None = None) -> Verdict:
    """Judge logs that are meant to be one benchmark result.

    Args:
        paths: all logs of the result, in launch order.
        ruleset: version to judge by; None for the newest that accepts the first log's benchmark.

    Raises:
        ConfigError: if ``ruleset`` is not a version that the suite knows.
        ValueError: if there are no paths.
    """
    if not paths:
        raise ValueError("a set of no logs cannot be judged")
    return _judge_together([judge(path, ruleset) for path in paths], ruleset)


def _judge_together(verdicts: Sequence[Verdict], ruleset: str | None) -> Verdict:
    """The verdict of a set from the verdicts of its runs."""
    paths = [path for verdict in verdicts for path in verdict.paths]
    first = verdicts[0]
    refused = [f"{v.paths[0].name} is refused: {v.reasons[0]}" for v in verdicts if v.kind == "refused"]
    if refused:
        return Verdict("refused", tuple(refused), (), first.benchmark, first.ruleset, tuple(paths))
    logs = [read_log(path) for path in paths]
    names = sorted({str(log.benchmark) for log in logs})
    if len(names) > 1:
        mixed = f"the logs are of different benchmarks: {', '.join(names)}"
        return Verdict("refused", (mixed,), (), None, ruleset, tuple(paths))
    rules = rules_for(names[0], ruleset)
    reasons = tuple(_set_complaints(logs, verdicts, rules))
    notes = list(first.notes)
    score: float | None = None
    if not reasons:
        factor, reasons, note = _convergence(paths, logs, rules)
        notes.append(note)
        score = factor * olympic_mean([_minutes(v) for v in verdicts], rules.dropped)
    return Verdict(
        "refused" if reasons else "submittable",
        reasons,
        tuple(notes),
        names[0],
        rules.ruleset,
        tuple(paths),
        converged=sum(not v.converged for v in verdicts) <= rules.non_converged,
        score=None if reasons else score,
    )


def _minutes(verdict: Verdict) -> float:
    """A run's time; infinite for one that did not converge."""
    return verdict.score if verdict.converged and verdict.score is not None else float("inf")


def _set_complaints(logs: Sequence[ParsedLog], verdicts: Sequence[Verdict], rules: Rules) -> list[str]:
    complaints = []
    for log, verdict in zip(logs, verdicts, strict=True):
        if log.stand_in:
            complaints.append(f"{log.path.name}: the data are a stand-in: {NOT_A_RESULT}")
        elif verdict.kind == "format" and (verdict.converged or len(verdict.reasons) > 1):
            complaints.append(f"{log.path.name} is not a valid run: {verdict.reasons[-1]}")
    failed = [v.paths[0].name for v in verdicts if not v.converged]
    if len(failed) > rules.non_converged:
        complaints.append(
            f"{len(failed)} runs did not converge ({', '.join(failed)}); {rules.non_converged} may in a result"
        )
    if len(logs) != rules.runs:
        complaints.append(f"a result of {rules.log_name} has exactly {rules.runs} runs, these are {len(logs)}")
    complaints += _repeated_seeds(logs)
    complaints += _differences(logs, rules)
    return complaints


def _repeated_seeds(logs: Sequence[ParsedLog]) -> list[str]:
    owner: dict[tuple[str, int, object], str] = {}
    complaints = []
    for log in logs:
        for seed in dict.fromkeys(log.seeds):
            if seed in owner:
                complaints.append(f"{owner[seed]} and {log.path.name} have the same seed {seed[2]}")
            owner[seed] = log.path.name
    return complaints


def _differences(logs: Sequence[ParsedLog], rules: Rules) -> list[str]:
    """The configuration keys in which the logs differ: all keys of the rule files that occur once in a run."""
    prefix = f"{rules.usage}_{rules.ruleset}"
    records = {
        key: record
        for file in ("common.yaml", "closed_common.yaml", f"closed_{rules.log_name}.yaml")
        for key, record in rule_records(f"{prefix}/{file}").items()
    }
    names = [key for key, record in records.items() if record.get("REQ") == "EXACTLY_ONE"]
    logged = [e.key for e in logs[0].events if e.key.startswith(("lars_", "sgd_", "opt_", "scheduler_"))]
    names = list(dict.fromkeys([*names, "global_batch_size", *logged]))
    complaints = []
    for key in names:
        values = {repr(log.value(key)): log.path.name for log in logs} if key not in _RUN_KEYS else {}
        if len(values) > 1:
            listed = ", ".join(f"{value} in {name}" for value, name in values.items())
            complaints.append(f"the runs have different configurations: {key} is {listed}")
    return complaints


def _convergence(paths: Sequence[Path], logs: Sequence[ParsedLog], rules: Rules) -> tuple[float, tuple[str, ...], str]:
    """Score factor, reasons for refusal and note of the RCP test."""
    if logs[0].division != "closed":
        return 1.0, (), "open division: convergence is not compared with the reference"
    if not has_rcps(rules.log_name, rules.ruleset):
        return 1.0, (), f"mlperf-logging cannot test the convergence of {rules.log_name} in {rules.ruleset}: no RCPs"
    result = check_convergence(paths, rules.log_name, rules.ruleset)
    if not result.passed:
        return 1.0, (f"the RCP test fails: {result.message}",), ""
    return result.factor, (), f"RCP test passed ({result.message}), score factor {result.factor:.4f}"


def format_verdict(verdict: Verdict) -> str:
    """A short report of a verdict for a human: a headline, then one line for each reason and note."""
    many = len(verdict.paths) > 1
    subject = f"{len(verdict.paths)} logs" if many else str(verdict.paths[0])
    about = f"{verdict.benchmark or 'unknown benchmark'}, ruleset {verdict.ruleset or 'none'}"
    lines = [f"{subject}: {verdict.kind.upper()} ({about})"]
    lines += [f"  - {reason}" for reason in verdict.reasons]
    lines += [f"  note: {note}" for note in verdict.notes if note]
    if verdict.kind == "format":
        lines.append(f"  {NOT_A_RESULT}" if not any(NOT_A_RESULT in r for r in verdict.reasons) else "")
    elif verdict.kind != "refused":
        if verdict.score is not None:
            name = "score" if many else "time of this run (one run is never a score)"
            lines.append(f"  {name}: {verdict.score:.3f} minutes")
        lines.append(f"  {UNVERIFIED}")
    return "\n".join(line for line in lines if line)


def main(argv: Sequence[str] | None = None) -> int:
    """``mlperf-suite check LOG [LOG ...] [--ruleset X.Y.Z]``: print the verdict of each log, and of several as a set.

    Returns:
        0; 1 if a log or the set is refused; 2 if the ruleset is not known.
    """
    parser = argparse.ArgumentParser(prog="mlperf-suite check", description="Say what the logs of runs may claim.")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="log of one run")
    parser.add_argument("--ruleset", help="version to judge by (default: the newest that accepts the benchmark)")
    args = parser.parse_args(argv)
    try:
        verdicts = [judge(path, args.ruleset) for path in args.logs]
        for verdict in verdicts:
            print(format_verdict(verdict))
        if len(args.logs) > 1:
            verdicts.append(_judge_together(verdicts, args.ruleset))
            print(format_verdict(verdicts[-1]))
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 1 if any(verdict.kind == "refused" for verdict in verdicts) else 0
