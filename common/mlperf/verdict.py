"""Verdicts on one log and on a set of runs.

There are four verdicts. *Refused* comes with its reasons. *Format* means that only the format of the log is valid;
synthetic data, custom data or a run below its target cannot get more. A *valid run* could be part of a result.
*Submittable* is a full set of runs under one ruleset that accepts the benchmark. MLCommons has verified none of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from common.errors import ConfigError, DataError, printable
from common.mlperf.agreement import disagreeing_progress, odd_blocks, odd_sizes, wrong_counts
from common.mlperf.checker_process import CheckerStopped, one_checker_process
from common.mlperf.compliance import RuleFinding, judged_keys, reached_rule_files, rule_records
from common.mlperf.evaluation_points import check_evaluation_points, reported_checkpoints
from common.mlperf.parsed_log import ParsedLog, distinct_names, read_log
from common.mlperf.progress import implausible_notes
from common.mlperf.rcp import check_convergence, has_rcps, olympic_mean
from common.mlperf.refusals import Refusal
from common.mlperf.rules import Rules, accepting_rulesets, open_rulesets, require_ruleset, rules_for
from common.mlperf.run_clock import check_clock
from common.mlperf.run_refusals import (
    backward_refusals,
    cache_cleared,
    cache_refusals,
    evaluation_refusals,
    run_refusals,
    seed_notes,
    seed_refusals,
    set_seed_refusals,
    success_refusals,
    text_rule_refusals,
)

VerdictKind = Literal["refused", "format", "valid run", "submittable"]

NOT_A_RESULT = "not an MLPerf result of any division"
UNVERIFIED = "unverified: not verified by MLCommons Association"

_RUN_KEYS = frozenset({"seed", "train_samples", "init_stop", "run_start", "run_stop"})
"""Keys that occur once in a run and may differ between the runs of a set."""

_MACHINE_KEYS = ("number_of_nodes", "accelerators_per_node", "ruleset", "data_set")
"""Keys that no rule file of training requires, but that must be equal in all runs of a result."""

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
"""Keys that come after run_start. A run that was killed early may lack them: it failed, but the log is not invalid."""

MOST_LINES = 8
"""Largest number of lines that a message lists for one key."""
UNREPORTED_IN = ("4.0.0", "4.1.0", "5.0.0")
"""Rounds in which unreported checkpoints cause only a note: in no published result that we know, a run has all."""
_NAME = re.compile(r"[a-z0-9_]{1,64}")


@dataclass(frozen=True)
class Verdict:
    """Verdict on a log or a set of logs.

    Attributes:
        refusals: reasons of the verdict ``refused``; else empty.
        limits: sentences that say why the verdict is only ``format``.
        notes: sentences that do not change the verdict.
        benchmark: name in the logs; None if there is none.
        ruleset: version that was applied; None if there was none.
        converged: whether the run, or enough runs of the set, reached the target.
        score: time of the run, or olympic mean of the set times the RCP factor, in minutes; None without a score.
        log: log of a single run; None for a set and for a log that cannot be read.
    """

    kind: VerdictKind
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]
    benchmark: str | None
    ruleset: str | None
    paths: tuple[Path, ...]
    limits: tuple[str, ...] = ()
    converged: bool = False
    score: float | None = None
    log: ParsedLog | None = field(default=None, repr=False, compare=False)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences that say why the verdict is not better."""
        return self.refusals or self.limits

    @property
    def cut_short(self) -> bool:
        """Whether the only reason for refusing the log is that its run did not end.

        In a result, such a run counts as one that missed the target. The package checker accepts as many logs that do
        not comply as runs may miss the target.
        """
        started = self.log is not None and self.log.unfinished
        return self.kind == "refused" and started and all(each.reason == "run-incomplete" for each in self.refusals)

    @property
    def minutes(self) -> float | None:
        """Time of a run for olympic scoring; None, which counts as infinite, if it did not converge."""
        return self.score if self.converged and self.kind != "refused" else None


def data_limit(log: ParsedLog) -> str:
    """Return the limit of a log whose data are not the benchmark's."""
    return f"{log.other_data}: {NOT_A_RESULT}"


def judge(path: Path, ruleset: str | None = None, follow: bool = True) -> Verdict:
    """Judge the log of one run, written by this suite or by any other program.

    Args:
        ruleset: version; None for the version in the log, or else the newest under which the log is valid.
        follow: whether the path may be a symbolic link.

    Raises:
        ConfigError: ``ruleset`` is not known.
    """
    require_ruleset(ruleset)
    try:
        log = read_log(path, follow)
    except DataError as error:
        return _refused(path, ruleset, None, [Refusal("log-unreadable", str(error))])
    return judge_log(log, ruleset)


def _refused(
    path: Path, ruleset: str | None, benchmark: str | None, refusals: Sequence[Refusal], log: ParsedLog | None = None
) -> Verdict:
    return Verdict("refused", tuple(dict.fromkeys(refusals)), (), benchmark, ruleset, (path,), log=log)


def judge_log(log: ParsedLog, ruleset: str | None = None) -> Verdict:
    """Judge the parsed log of one run; see :func:`judge`."""
    require_ruleset(ruleset)
    with one_checker_process():
        if ruleset is not None:
            return _judge_under(log, ruleset)
        candidates = candidate_rulesets([log])
        if not candidates:
            return _judge_under(log, None)
        newest = _judge_under(log, candidates[0])
        if newest.kind != "refused":
            return newest
        others = [version for version in reversed(accepting_rulesets(str(log.benchmark))) if version != candidates[0]]
        for version in sorted(others, key=lambda each: each not in candidates):
            verdict = _judge_under(log, version)
            if verdict.kind != "refused":
                note = f"under ruleset {version} this log has the verdict {verdict.kind}: --ruleset {version}"
                return verdict if version in candidates else replace(newest, notes=(*newest.notes, note))
        return newest


def candidate_rulesets(logs: Sequence[ParsedLog]) -> list[str]:
    """Return the rulesets under which logs may have been run, newest first; empty if none accepts the benchmark.

    If all logs state the same accepting ruleset, only this one is returned; else every ruleset that accepts the
    benchmark and whose round was still open when the first of the runs started.
    """
    name = next((log.benchmark for log in logs if isinstance(log.benchmark, str)), "")
    starts = [event.time_ms for log in logs for event in log.all("run_start")[:1]]
    try:
        known = open_rulesets(name, min(starts, default=0.0)) if _NAME.fullmatch(name) else []
        stated = {repr(log.value("ruleset")): log.value("ruleset") for log in logs}
        version = next(iter(stated.values()), None)
        if len(stated) == 1 and isinstance(version, str) and version in accepting_rulesets(name):
            return [version]
        return known
    except ConfigError:
        return []


def _judge_under(log: ParsedLog, ruleset: str | None) -> Verdict:
    try:
        rules = rules_for(_log_name(log), ruleset)
        _require_log_name(log, rules)
    except ConfigError as error:
        name = log.benchmark if isinstance(log.benchmark, str) else None
        return _refused(log.path, ruleset, name, [Refusal("benchmark-unknown", str(error))], log)
    return _judge(log, rules)


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
    """Return the verdict on a log under a ruleset that accepts it.

    Values that select unknown rule files are refused before the checker runs.
    """
    files, unfit = reached_rule_files([*log.events, *log.echoes], rules.usage, rules.ruleset)
    if unfit:
        refusals = [Refusal("rule-file-unknown", text) for text in unfit]
        return _refused(log.path, rules.ruleset, log.benchmark, refusals, log)
    keys = judged_keys(files)
    positions = [position for position, event in enumerate(log.events) if event.key in keys]
    judged = ParsedLog(log.path, tuple(log.events[position] for position in positions))
    try:
        with one_checker_process() as checker:
            answer = checker.ask("compliance", [judged], usage=rules.usage, ruleset=rules.ruleset)
    except CheckerStopped as error:
        refusal = Refusal("compliance-no-answer", f"the compliance checker cannot judge this log: {error}")
        return _refused(log.path, rules.ruleset, log.benchmark, [refusal], log)
    findings = [RuleFinding(**finding) for finding in answer]
    placed = [
        finding if finding.position is None else replace(finding, position=positions[finding.position])
        for finding in findings
    ]
    return _conclude(log, rules, placed)


def _conclude(log: ParsedLog, rules: Rules, findings: Sequence[RuleFinding]) -> Verdict:
    closed, success = log.division == "closed", log.status == "success"
    of_clock, notes = check_clock(log, rules)
    refusals = [*run_refusals(log), *of_clock, *seed_refusals(log, rules), *cache_refusals(log)]
    below: list[str] = []
    tolerated: list[RuleFinding] = []
    for finding in findings:
        if finding.kind == "target":
            below.append(finding.sentence())
        elif log.status == "aborted" and _is_early_end(finding):
            notes.append(f"the run was aborted early: {finding.sentence()}")
        elif log.unfinished and _is_early_end(finding):
            continue  # run_refusals says that the run was cut short
        elif log.other_data and _is_value_rule(finding):
            tolerated.append(finding)
        else:
            refusals.append(Refusal("compliance-rule", _where(finding, log) + _in_words(finding, log)))
    refusals += [*evaluation_refusals(log, rules), *wrong_counts(log)]
    if closed:
        refusals += disagreeing_progress(log, rules)
        notes += [*odd_blocks(log, rules), *seed_notes(log, rules)]
    if closed and not log.other_data:
        misplaced, notes_on_points = check_evaluation_points(log, rules)
        refusals += [*text_rule_refusals(log, rules), *misplaced]
        notes += notes_on_points
        refusals += backward_refusals(log, rules)
        notes += odd_sizes(log, rules)
    if success and not below and not refusals and closed:
        refusals += success_refusals(log, rules)
    if success and below and not log.other_data:
        text = f"line {log.all('run_stop')[-1].line}: run_stop claims success, but {below[0]}"
        refusals.append(Refusal("target-missed", text))
    if rules.retired:
        notes.append(f"{rules.log_name} can no longer be submitted: its last round was {rules.last_round}")
    after = [event.line for event in log.echoes if log.all("run_stop") and event.line > log.all("run_stop")[0].line]
    if after:
        notes.append(f"{len(after)} lines after run_stop, from line {after[0]} on, repeat earlier ones: not judged")

    limits: list[str] = []
    if log.other_data:
        limits.append(data_limit(log))
        notes += implausible_notes(log, rules, below)
        notes += [f"on the benchmark's data this would be refused: {finding.sentence()}" for finding in tolerated]
    if not success and not refusals:
        limits.append(f"the run did not reach the target (status {log.status})")
    if not log.other_data:
        cleared = cache_cleared([event.value for event in log.all("cache_clear")])
        if cleared is False:
            limits.append("the page cache was not cleared before the run (cache_clear is false)")
        elif cleared is None:
            notes.append(
                "the log does not state whether the page cache was cleared (cache_clear is neither true nor false)"
            )
    kind: VerdictKind = "refused" if refusals else "format" if limits else "valid run"
    return Verdict(
        kind,
        tuple(dict.fromkeys(refusals)),
        tuple(notes),
        log.benchmark,
        rules.ruleset,
        (log.path,),
        limits=tuple(limits),
        converged=success and not below,
        score=log.run_minutes,
        log=log,
    )


def _is_value_rule(finding: RuleFinding) -> bool:
    """Return whether the finding is about a value that a benchmark fixes, not about the form of the log."""
    file = finding.rule_file.rpartition("/")[2]
    return (
        finding.kind == "check"
        and file not in ("common.yaml", "closed_common.yaml", "open_common.yaml")
        and "metadata" not in finding.test
    )


def _is_early_end(finding: RuleFinding) -> bool:
    """Return whether the finding is only about missing events that come after ``run_start``."""
    if finding.kind != "occurrence" or "different values" in finding.test:
        return False
    return set(re.findall(r"'(\w+)'", finding.test)) <= {*_KEYS_OF_PROGRESS, "run_stop"}


def _where(finding: RuleFinding, log: ParsedLog) -> str:
    """Return a prefix that names the lines of a checker's complaint; empty if it has no lines."""
    if finding.position is not None:
        return f"line {log.events[finding.position].line}: "
    lines = [event.line for event in log.all(finding.key)] if finding.kind == "occurrence" else []
    more = ", ..." if len(lines) > MOST_LINES else ""
    return f"lines {', '.join(map(str, lines[:MOST_LINES]))}{more}: " if len(lines) > 1 else ""


def _in_words(finding: RuleFinding, log: ParsedLog) -> str:
    """Return a complaint of the checker, with the time if initialisation took too long (the checker omits it)."""
    minutes = log.init_minutes
    if "compile_time_mins" in finding.test and minutes is not None and log.division in ("closed", "open"):
        return f"initialisation, init_start to init_stop, took {minutes:.1f} minutes, too long: {finding.sentence()}"
    return finding.sentence()


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
    divisions: dict[str, str] = {}
    for log in logs:
        for event in log.all("submission_division")[:1]:
            divisions.setdefault(repr(event.value), f"{named[log.path]}, line {event.line}")
    if len(divisions) > 1:
        listed = ", ".join(f"{value[:80]} in {where}" for value, where in divisions.items())
        return [Refusal("division-differs", f"submission_division is {listed}")]
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
    for key in names:
        values: dict[str, str] = {}
        for log in logs:
            ended_before = key in _KEYS_OF_PROGRESS and log.status != "success" and not log.all(key)
            if key not in _RUN_KEYS and not ended_before:
                at = next((f", line {event.line}" for event in log.all(key)), "")
                values.setdefault(repr(log.value(key)), named[log.path] + at)
        if len(values) > 1:
            listed = ", ".join(f"{value[:80]} in {name}" for value, name in values.items())
            text = f"the runs have different configurations: {key} is {listed}"
            found.append(Refusal("configurations-differ", text))
    return found


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


def format_verdict(verdict: Verdict, subject: str | None = None) -> str:
    """Return a short report of a verdict: a headline, then one line for each reason and note.

    Args:
        subject: subject of the headline; None for the path of the log, or the number of logs.
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
