"""Verdicts on one log; :mod:`common.mlperf.result_verdict` judges the runs of a result together.

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
from common.mlperf.compliance import RuleFinding, judged_keys, reached_rule_files
from common.mlperf.evaluation_points import check_evaluation_points
from common.mlperf.parsed_log import ParsedLog, read_log
from common.mlperf.progress import implausible_notes
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
    success_refusals,
    text_rule_refusals,
)

VerdictKind = Literal["refused", "format", "valid run", "submittable"]

NOT_A_RESULT = "not an MLPerf result of any division"
UNVERIFIED = "unverified: not verified by MLCommons Association"

KEYS_OF_PROGRESS = frozenset(
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
    return set(re.findall(r"'(\w+)'", finding.test)) <= {*KEYS_OF_PROGRESS, "run_stop"}


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
