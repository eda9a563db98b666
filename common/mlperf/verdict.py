"""What a log may claim: the verdict of one run's log, and that of a set of runs.

Four verdicts, from the least to the most: *refused*, with the reasons; *format*, the keys are right and nothing else
is claimed (all that stand-in data or a run below its target can earn); *valid run*, one run that could be part of a
result; *submittable*, a full set of runs under one ruleset that accepts the benchmark. Nothing here is verified by
MLCommons Association.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from common.errors import ConfigError, DataError
from common.mlperf.compliance import Finding, check_file, rule_records
from common.mlperf.constraints import TEXT_RULES
from common.mlperf.evaluation_points import misplaced_evaluations
from common.mlperf.parsed_log import Event, ParsedLog, evaluation_of, read_log
from common.mlperf.rcp import check_convergence, has_rcps, olympic_mean
from common.mlperf.rules import RULESETS, Rules, rules_for

VerdictKind = Literal["refused", "format", "valid run", "submittable"]

NOT_A_RESULT = "not an MLPerf result of any division"
UNVERIFIED = "unverified: not verified by MLCommons Association"

_RUN_KEYS = frozenset({"seed", "train_samples", "init_stop", "run_start", "run_stop"})
"""Keys that occur once in a run and may differ between the runs of a set."""

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

_BLOCK_KEYS = frozenset({"block_start", "block_stop", "epoch_start", "epoch_stop"})

CLOCK_TOLERANCE_MS = 1000.0
"""By how much a time may lie before that of an earlier line: clocks are stepped, and events come from several ranks."""


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

    @property
    def minutes(self) -> float | None:
        """A run's time as olympic scoring takes it; None, which counts as infinite, if it did not converge."""
        return self.score if self.converged and self.kind != "refused" else None


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
        elif log.status == "aborted" and _is_early_end(finding):
            notes.append(f"the run was aborted early: {finding.sentence()}")
        elif log.stand_in and _is_value_rule(finding):
            tolerated.append(finding)
        else:
            refusals.append(_in_words(finding, log))
    refusals += _evaluation_complaints(log, rules)
    if log.division == "closed":
        refusals += _clock_complaints(log, rules)
    if log.division == "closed" and not log.stand_in:
        refusals += [*_text_rule_complaints(log, rules), *misplaced_evaluations(log, rules)]
        refusals += _backward_complaints(log, rules)
    success = log.status == "success"
    if success and not below and not refusals and log.division == "closed":
        refusals += _success_complaints(log, rules)
    if success and below and not log.stand_in:
        refusals += [f"run_stop claims success, but {below[0]}"]
    if rules.retired:
        notes.append(f"{rules.log_name} can no longer be submitted: its last round was {rules.last_round}")

    limits: list[str] = []
    if log.stand_in:
        limits.append(f"the data are a stand-in: {NOT_A_RESULT}")
        notes += [f"on real data this would be refused: {finding.sentence()}" for finding in tolerated]
    if not success and not refusals:
        limits.append(f"the run did not reach the target (status {log.status})")
    if not log.stand_in and not any(event.value in (True, 1) for event in log.all("cache_clear")):
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


def _is_early_end(finding: Finding) -> bool:
    """Whether the finding is only that something is absent which comes after ``run_start``."""
    if finding.kind != "occurrence" or "different values" in finding.test:
        return False
    return set(re.findall(r"'(\w+)'", finding.test)) <= _KEYS_OF_PROGRESS


def _in_words(finding: Finding, log: ParsedLog) -> str:
    """A complaint of the checker; that on the time of initialisation with the time, which the checker does not say."""
    minutes = log.init_minutes
    if "compile_time_mins" in finding.test and minutes is not None and log.division in ("closed", "open"):
        return f"initialisation, init_start to init_stop, took {minutes:.1f} minutes, too long: {finding.sentence()}"
    return finding.sentence()


def _evaluation_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """Evaluations that are no numbers: the checkers die of them, or of a progress that is no number."""
    complaints = []
    for event in log.all(rules.quality_key):
        progress = event.metadata.get(rules.progress_key, 0)
        where = f"of the {rules.quality_key} in line {event.line}"
        if evaluation_of(event) is None:
            complaints.append(f"the value {where} is {json.dumps(event.value)}, not a number")
        if isinstance(progress, bool) or not isinstance(progress, int | float) or not math.isfinite(progress):
            complaints.append(f"{rules.progress_key} {where} is {json.dumps(progress)}, not a number")
    return complaints


def _clock_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """Whether the clock went backwards: the time from run_start to run_stop then tells nothing.

    A run that evaluates beside its training may log evaluations with an earlier time than the lines around them, and
    train on after the evaluation at which its clock stopped; blocks among themselves go forwards, and evaluations lie
    within the run.
    """
    starts, stops = log.all("run_start"), log.all("run_stop")
    if rules.benchmark == "stable_diffusion" or not starts or not stops:  # scores its checkpoints after the run
        return []
    start, stop = starts[0], stops[-1]
    if stop.time_ms < start.time_ms:  # which the complaints about the run say
        return []
    blocks = [start, *(event for event in log.events if event.key in _BLOCK_KEYS and event.line > start.line)]
    for before, after in pairwise(blocks):
        if after.time_ms < before.time_ms - CLOCK_TOLERANCE_MS:
            return [
                f"the clock goes back by {(before.time_ms - after.time_ms) / 1000:.1f} s from {before.key} in line "
                f"{before.line} to {after.key} in line {after.line}: the run's time cannot be told"
            ]
    for event in log.all(rules.quality_key):
        if not start.line < event.line < stop.line:
            continue
        early, late = start.time_ms - event.time_ms, event.time_ms - stop.time_ms
        if max(early, late) > CLOCK_TOLERANCE_MS:
            other = (
                f"earlier than run_start in line {start.line}"
                if early > late
                else f"later than run_stop in line {stop.line}"
            )
            return [
                f"{event.key} in line {event.line} is {max(early, late) / 1000:.1f} s {other}, though it stands within "
                "the run: the run's time cannot be told"
            ]
    return []


def _text_rule_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """Hyperparameters that the rules' own table forbids and the compliance checker does not test."""
    logged = {event.key: event.value for event in reversed(log.events)}
    complaints = []
    for rule in TEXT_RULES.get(rules.benchmark, ()):
        try:
            if rule.key not in logged or rule.holds(logged):
                continue
        except ConfigError as error:
            complaints.append(str(error))
        else:
            complaints.append(f"{rule.key} = {logged[rule.key]!r} breaks the rules' table: {rule.text}")
    return complaints


def _backward_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """Evaluations after less training than the one before: events of another run, or written by hand."""
    if rules.benchmark == "stable_diffusion":  # its checkpoints are scored afterwards, in any order
        return []
    points = [point for point in log.evaluations if point.progress_key == rules.progress_key]
    for before, after in pairwise(points):
        if after.progress < before.progress:
            return [
                f"an evaluation after {rules.progress_key} {after.progress:g} follows one after {before.progress:g}: "
                "progress goes backwards"
            ]
    return []


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
    if wrong:
        return [f"seed {seed!r} is not an integer" for seed in wrong]
    places: dict[str, int] = {}
    for event, seed in zip(log.all("seed"), log.seeds, strict=True):
        if (line := places.setdefault(repr(seed), event.line)) != event.line:
            return [
                f"the seed {event.value} is logged twice from one place (lines {line} and {event.line}): the seed "
                "checker takes it for two runs; let one rank, and one handler, write the log"
            ]
    return []


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


def judge_together(verdicts: Sequence[Verdict], ruleset: str | None) -> Verdict:
    """Judge runs that are meant to be one benchmark result.

    Args:
        verdicts: of all runs of the result, in launch order.
        ruleset: version that they were judged by; None for the newest that accepts the benchmark.
    """
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
    return float("inf") if verdict.minutes is None else verdict.minutes


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
    return [*complaints, *contradictions(logs, rules)]


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
    for log in logs:
        for key, (_, _, seed) in {repr(seed): seed for seed in log.seeds}.items():
            if key in owner:
                complaints.append(f"{owner[key]} and {log.path.name} have the same seed {seed}")
            owner[key] = log.path.name
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
    names = list(dict.fromkeys([*names, "global_batch_size", *logged]))
    complaints = []
    for key in names:
        values: dict[str, str] = {}
        for log in logs:
            ended_before = key in _KEYS_OF_PROGRESS and log.status == "aborted" and not log.all(key)
            if key not in _RUN_KEYS and not ended_before:
                values.setdefault(repr(log.value(key)), log.path.name)
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
    lines += [f"  note: {note}" for note in verdict.notes if note]
    if verdict.kind == "format":
        lines.append(f"  {NOT_A_RESULT}" if not any(NOT_A_RESULT in r for r in verdict.reasons) else "")
    elif verdict.kind != "refused":
        if verdict.score is not None:
            name = "score" if many else "time of this run (one run is never a score)"
            lines.append(f"  {name}: {verdict.score:.3f} minutes")
        lines.append(f"  {UNVERIFIED}")
    return "\n".join(line for line in lines if line)
