"""What a log may claim: the verdict of one run's log, and that of a set of runs.

Four verdicts, from the least to the most: *refused*, with the reasons; *format*, the keys are right and nothing else
is claimed (all that stand-in data or a run below its target can earn); *valid run*, one run that could be part of a
result; *submittable*, a full set of runs under one ruleset that accepts the benchmark. Nothing here is verified by
MLCommons Association.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from common.errors import ConfigError, DataError, printable
from common.mlperf.agreement import disagreeing_progress, wrong_counts, wrong_sizes
from common.mlperf.checker_process import CheckerStopped, one_checker_process
from common.mlperf.compliance import Finding, inadmissible, rule_records
from common.mlperf.evaluation_points import misplaced_evaluations, reported_checkpoints
from common.mlperf.log_names import distinct_names
from common.mlperf.parsed_log import ParsedLog, read_log
from common.mlperf.rcp import check_convergence, has_rcps, olympic_mean
from common.mlperf.rules import RULESETS, Rules, accepting_rulesets, rules_for
from common.mlperf.run_clock import clock_complaints
from common.mlperf.run_complaints import (
    backward_complaints,
    evaluation_complaints,
    run_complaints,
    seed_complaints,
    success_complaints,
    text_rule_complaints,
)

VerdictKind = Literal["refused", "format", "valid run", "submittable"]

NOT_A_RESULT = "not an MLPerf result of any division"
UNVERIFIED = "unverified: not verified by MLCommons Association"

_RUN_KEYS = frozenset({"seed", "train_samples", "init_stop", "run_start", "run_stop"})
"""Keys that occur once in a run and may differ between the runs of a set."""

_MACHINE_KEYS = ("number_of_nodes", "accelerators_per_node", "ruleset", "data_set")
"""Keys that no rule file of training asks for and that the runs of a result have in common."""

_KEYS_OF_PROGRESS = frozenset(
    {
        "aggregated_eval_accuracy",
        "block_start",
        "block_stop",
        "epoch_start",
        "epoch_stop",
        "eval_accuracy",
        "eval_error",
        "eval_samples",
        "eval_start",
        "eval_stop",
        "train_samples",
    }
)
"""Keys that come after run_start, which a run that was killed early may lack: it failed, its log is no forgery."""

MOST_LINES = 8
"""How many lines of one key are named."""
_NAME = re.compile(r"[a-z0-9_]{1,64}")


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
        log: of one run; None if it cannot be read, and of a set.
    """

    kind: VerdictKind
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    benchmark: str | None
    ruleset: str | None
    paths: tuple[Path, ...]
    converged: bool = False
    score: float | None = None
    log: ParsedLog | None = field(default=None, repr=False, compare=False)

    @property
    def minutes(self) -> float | None:
        """A run's time as olympic scoring takes it; None, which counts as infinite, if it did not converge."""
        return self.score if self.converged and self.kind != "refused" else None


def judge(path: Path, ruleset: str | None = None, follow: bool = True) -> Verdict:
    """Judge the log of one run, written by this suite or not.

    Args:
        path: the log.
        ruleset: version to judge by; None for the newest that accepts the log's benchmark.
        follow: whether the path may be a link.

    Raises:
        ConfigError: if ``ruleset`` is not a version that the suite knows.
    """
    _require_known(ruleset)
    try:
        log = read_log(path, follow)
    except DataError as error:
        return Verdict("refused", (str(error),), (), None, ruleset, (path,))
    return judge_log(log, ruleset)


def judge_log(log: ParsedLog, ruleset: str | None = None) -> Verdict:
    """Judge the log of one run, as :func:`judge`, once it is read."""
    _require_known(ruleset)
    try:
        rules = rules_for(_log_name(log), ruleset)
        _require_log_name(log, rules)
    except ConfigError as error:
        name = log.benchmark if isinstance(log.benchmark, str) else None
        return Verdict("refused", (str(error),), (), name, ruleset, (log.path,), log=log)
    with one_checker_process():
        verdict = _judge(log, rules)
        if verdict.kind != "refused" or ruleset is not None:
            return verdict
        for older in reversed(accepting_rulesets(rules.log_name)[:-1]):
            fits = _judge(log, rules_for(rules.log_name, older))
            if fits.kind != "refused":
                note = f"under ruleset {older} this log has the verdict {fits.kind}: --ruleset {older}"
                return replace(verdict, notes=(*verdict.notes, note))
    return verdict


def _require_known(ruleset: str | None) -> None:
    if ruleset is not None and not any(ruleset in versions for versions in RULESETS.values()):
        raise ConfigError(f"ruleset {ruleset!r} is not known; known are {', '.join(RULESETS['training'])}")


def _log_name(log: ParsedLog) -> str:
    name = log.benchmark
    if not isinstance(name, str):
        raise ConfigError(f"{log.path}: the log does not name its benchmark (submission_benchmark)")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{log.path}: submission_benchmark {name[:80]!r} is not known: it is no benchmark's name")
    return name


def _require_log_name(log: ParsedLog, rules: Rules) -> None:
    if rules.log_name != log.benchmark:
        raise ConfigError(
            f"ruleset {rules.ruleset} does not accept the name {log.benchmark}; there it is {rules.log_name}"
        )


def _judge(log: ParsedLog, rules: Rules) -> Verdict:
    """The verdict of a log under a ruleset that accepts it; the checker sees it only if it may."""
    unfit = inadmissible([*log.events, *log.echoes], rules.usage, rules.ruleset)
    if unfit:
        return Verdict("refused", tuple(unfit), (), log.benchmark, rules.ruleset, (log.path,), log=log)
    try:
        with one_checker_process() as checker:
            answer = checker.ask("compliance", [log], usage=rules.usage, ruleset=rules.ruleset)
    except CheckerStopped as error:
        reason = f"the compliance checker cannot judge this log: {error}"
        return Verdict("refused", (reason,), (), log.benchmark, rules.ruleset, (log.path,), log=log)
    return _conclude(log, rules, [Finding(**finding) for finding in answer])


def _conclude(log: ParsedLog, rules: Rules, findings: Sequence[Finding]) -> Verdict:
    closed, success = log.division == "closed", log.status == "success"
    refusals = [*run_complaints(log), *clock_complaints(log, rules), *seed_complaints(log, rules)]
    below: list[str] = []
    notes: list[str] = []
    tolerated: list[Finding] = []
    for finding in findings:
        if finding.kind == "target":
            below.append(finding.sentence())
        elif log.status == "aborted" and _is_early_end(finding):
            notes.append(f"the run was aborted early: {finding.sentence()}")
        elif log.stand_in and _is_value_rule(finding):
            tolerated.append(finding)
        else:
            refusals.append(_where(finding, log) + _in_words(finding, log))
    refusals += [*evaluation_complaints(log, rules), *wrong_counts(log)]
    if closed:
        refusals += disagreeing_progress(log, rules)
    if closed and not log.stand_in:
        refusals += [*text_rule_complaints(log, rules), *misplaced_evaluations(log, rules), *wrong_sizes(log, rules)]
        refusals += backward_complaints(log, rules)
    if success and not below and not refusals and closed:
        refusals += success_complaints(log, rules)
    if success and below and not log.stand_in:
        refusals += [f"line {log.all('run_stop')[-1].line}: run_stop claims success, but {below[0]}"]
    if rules.retired:
        notes.append(f"{rules.log_name} can no longer be submitted: its last round was {rules.last_round}")
    if log.echoes:
        first = log.echoes[0]
        notes.append(
            f"{len(log.echoes)} lines after run_stop, from line {first.line} on, repeat earlier ones: not judged"
        )

    limits: list[str] = []
    if log.stand_in:
        limits.append(f"the data are a stand-in: {NOT_A_RESULT}")
        notes += [f"on real data this would be refused: {finding.sentence()}" for finding in tolerated]
    if not success and not refusals:
        limits.append(f"the run did not reach the target (status {log.status})")
    if not log.stand_in and (warm := _warm_cache([event.value for event in log.all("cache_clear")])) is not None:
        limits.append(warm)
    kind: VerdictKind = "refused" if refusals else "format" if limits else "valid run"
    return Verdict(
        kind,
        tuple(dict.fromkeys(refusals or limits)),
        tuple(notes),
        log.benchmark,
        rules.ruleset,
        (log.path,),
        converged=success and not below,
        score=log.run_minutes,
        log=log,
    )


def _warm_cache(values: Sequence[Any]) -> str | None:
    """Why a run cannot be said to have begun with an empty page cache; None if it says so."""
    said = [value for value in values if value is not None]
    if said and all(value in (True, 1) for value in said):
        return None
    if not said:
        return "whether the page cache was cleared before the run is not said (cache_clear is null)"
    if isinstance(said[0], str):
        return f"cache_clear is text, {json.dumps(said[0])[:40]}: write true or false"
    return "the page cache was not cleared before the run (cache_clear is false)"


def _is_value_rule(finding: Finding) -> bool:
    """Whether the finding is about a value that a benchmark fixes, not about the form of the log."""
    file = finding.rule_file.rpartition("/")[2]
    return (
        finding.kind == "check"
        and file not in ("common.yaml", "closed_common.yaml", "open_common.yaml")
        and "metadata" not in finding.test
    )


def _is_early_end(finding: Finding) -> bool:
    """Whether the finding is only that something is absent which comes after ``run_start``."""
    if finding.kind != "occurrence" or "different values" in finding.test:
        return False
    return set(re.findall(r"'(\w+)'", finding.test)) <= _KEYS_OF_PROGRESS


def _where(finding: Finding, log: ParsedLog) -> str:
    """The line, or lines, that a complaint of the checker is about, to be put before it; empty if it is about none."""
    if finding.position is not None:
        return f"line {log.events[finding.position].line}: "
    lines = [event.line for event in log.all(finding.key)] if finding.kind == "occurrence" else []
    more = ", ..." if len(lines) > MOST_LINES else ""
    return f"lines {', '.join(map(str, lines[:MOST_LINES]))}{more}: " if len(lines) > 1 else ""


def _in_words(finding: Finding, log: ParsedLog) -> str:
    """A complaint of the checker; that on the time of initialisation with the time, which the checker does not say."""
    minutes = log.init_minutes
    if "compile_time_mins" in finding.test and minutes is not None and log.division in ("closed", "open"):
        return f"initialisation, init_start to init_stop, took {minutes:.1f} minutes, too long: {finding.sentence()}"
    return finding.sentence()


def judge_together(verdicts: Sequence[Verdict], ruleset: str | None) -> Verdict:
    """Judge runs that are meant to be one benchmark result.

    Args:
        verdicts: of all runs of the result, in launch order.
        ruleset: version that they were judged by; None for the newest that accepts the benchmark.
    """
    paths = [path for verdict in verdicts for path in verdict.paths]
    first = verdicts[0]
    named = distinct_names(paths)
    refused = [f"{named[v.paths[0]]} is refused: {v.reasons[0]}" for v in verdicts if v.kind == "refused"]
    if refused:
        return Verdict("refused", tuple(refused), (), first.benchmark, first.ruleset, tuple(paths))
    logs = [verdict.log for verdict in verdicts if verdict.log is not None]
    names = sorted({str(log.benchmark) for log in logs})
    if len(names) > 1:
        mixed = f"the logs are of different benchmarks: {', '.join(names)}"
        return Verdict("refused", (mixed,), (), None, ruleset, tuple(paths))
    rules = rules_for(names[0], ruleset)
    reasons = tuple(_set_complaints(logs, verdicts, rules))
    notes = list(first.notes)
    score: float | None = None
    if not reasons:
        factor, reasons, said = _convergence(logs, rules)
        notes += said
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
    return float("inf") if verdict.minutes is None else verdict.minutes


def _set_complaints(logs: Sequence[ParsedLog], verdicts: Sequence[Verdict], rules: Rules) -> list[str]:
    complaints = []
    named = distinct_names([log.path for log in logs])
    for log, verdict in zip(logs, verdicts, strict=True):
        if log.stand_in:
            complaints.append(f"{named[log.path]}: the data are a stand-in: {NOT_A_RESULT}")
        elif verdict.kind == "format" and (verdict.converged or len(verdict.reasons) > 1):
            complaints.append(f"{named[log.path]} is not a valid run: {verdict.reasons[-1]}")
    failed = [named[v.paths[0]] for v in verdicts if not v.converged]
    if len(failed) > rules.non_converged:
        complaints.append(
            f"{len(failed)} runs did not converge ({', '.join(failed)}); {rules.non_converged} may in a result"
        )
    if len(logs) != rules.runs:
        complaints.append(f"a result of {rules.log_name} has exactly {rules.runs} runs, these are {len(logs)}")
    return [*complaints, *_unreported_checkpoints(logs, rules), *contradictions(logs, rules)]


def _unreported_checkpoints(logs: Sequence[ParsedLog], rules: Rules) -> list[str]:
    """Whether one run of a result that is scored offline reports all checkpoints up to the first that passes."""
    if not rules.scored_offline or logs[0].division != "closed":
        return []
    reported = [found for log in logs if (found := reported_checkpoints(log, rules)) is not None]
    if not reported or any(found.all for found in reported):
        return []
    return [
        "no run reports all checkpoints up to the first that meets the targets: of one in a result the rules want it"
    ]


def contradictions(logs: Sequence[ParsedLog], rules: Rules) -> list[str]:
    """Why logs cannot be runs of one series: two with the same seed, or with different configurations.

    The open division has no rule on seeds, and no list of hyperparameters.
    """
    if logs[0].division != "closed":
        return []
    return [*_repeated_seeds(logs), *_differences(logs, rules)]


def _repeated_seeds(logs: Sequence[ParsedLog]) -> list[str]:
    owner: dict[str, str] = {}
    complaints = []
    named = distinct_names([log.path for log in logs])
    for log in logs:
        for key, (_, _, seed) in {repr(seed): seed for seed in log.seeds}.items():
            if key in owner:
                complaints.append(f"{owner[key]} and {named[log.path]} have the same seed {json.dumps(seed)[:80]}")
            owner[key] = named[log.path]
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
    logged = [e.key for log in logs for e in log.events if e.key.startswith(("lars_", "sgd_", "opt_", "scheduler_"))]
    machine = [key for key in _MACHINE_KEYS if any(log.all(key) for log in logs)]
    names = list(dict.fromkeys([*names, "global_batch_size", *machine, *logged]))
    complaints = []
    named = distinct_names([log.path for log in logs])
    for key in names:
        values: dict[str, str] = {}
        for log in logs:
            ended_before = key in _KEYS_OF_PROGRESS and log.status == "aborted" and not log.all(key)
            if key not in _RUN_KEYS and not ended_before:
                at = next((f", line {event.line}" for event in log.all(key)), "")
                values.setdefault(repr(log.value(key)), named[log.path] + at)
        if len(values) > 1:
            listed = ", ".join(f"{value[:80]} in {name}" for value, name in values.items())
            complaints.append(f"the runs have different configurations: {key} is {listed}")
    return complaints


def _convergence(logs: Sequence[ParsedLog], rules: Rules) -> tuple[float, tuple[str, ...], tuple[str, ...]]:
    """Score factor, reasons for refusal and notes of the RCP test."""
    if logs[0].division != "closed":
        return 1.0, (), ("open division: convergence is not compared with the reference",)
    if not has_rcps(rules.log_name, rules.ruleset):
        note = f"mlperf-logging cannot test the convergence of {rules.log_name} in {rules.ruleset}: no RCPs"
        return 1.0, (), (note,)
    result = check_convergence(logs, rules.log_name, rules.ruleset)
    if not result.passed:
        return 1.0, (f"the RCP test fails: {result.message}",), ()
    return result.factor, (), (f"RCP test passed ({result.message}), score factor {result.factor:.4f}",)


def format_verdict(verdict: Verdict, subject: str | None = None) -> str:
    """A short report of a verdict for a human: a headline, then one line for each reason and note.

    Args:
        verdict: of one log or a set.
        subject: what it is of; None for the log's path, or the number of logs.
    """
    many = subject is not None or len(verdict.paths) > 1
    subject = subject or (f"{len(verdict.paths)} logs" if many else str(verdict.paths[0]))
    about = f"{verdict.benchmark or 'unknown benchmark'}, ruleset {verdict.ruleset or 'none'}"
    lines = [f"{subject}: {verdict.kind.upper()} ({about})"]
    lines += [f"  - {reason}" for reason in verdict.reasons]
    lines += [f"  note: {note}" for note in verdict.notes]
    if verdict.kind == "format":
        lines.append(f"  {NOT_A_RESULT}" if not any(NOT_A_RESULT in r for r in verdict.reasons) else "")
    elif verdict.kind != "refused":
        if verdict.score is not None:
            name = "score" if many else "time of this run (one run is never a score)"
            lines.append(f"  {name}: {verdict.score:.3f} minutes")
        lines.append(f"  {UNVERIFIED}")
    return "\n".join(printable(line) for line in lines if line)
