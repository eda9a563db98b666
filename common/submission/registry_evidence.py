"""Find contradictions in ``runs.jsonl``, and between ``runs.jsonl`` and the logs.

The launcher runs experiments one after the other, and instances at the same time. It writes one line before and one
line after each, and takes the result of the run from its log. If somebody edits the file or a log later, the two
contradict each other.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from common.errors import NOT_CONVERGED, ConfigError
from common.launch.series import RUNS_FILE, Begin, End, Experiment, Series
from common.mlperf.parsed_log import ParsedLog
from common.mlperf.rules import rules_for
from common.mlperf.seeds import experiment_seed
from common.mlperf.verdict import VerdictKind

CLOCKS_MS = 60_000.0
"""Allowed difference in milliseconds between the clocks of the launcher's machine and of the training machine."""
MINUTES = 0.01 / 60
"""Allowed rounding difference in minutes (0.01 seconds) between the run times in the log and in ``runs.jsonl``."""


def own_contradictions(series: Series) -> Iterator[str]:
    """Yield contradictions between the lines of one series, and values that no launcher writes."""
    where = series.folder / RUNS_FILE
    first = series.experiments[0].begin
    for run in series.experiments:
        begin, about = run.begin, f"{where}: experiment {run.begin.experiment}"
        for field, expected in (("log", f"{_name(begin)}.log"), ("output_dir", _name(begin))):
            if getattr(begin, field) != expected:
                yield f"{about} has the {field} {getattr(begin, field)}, a launcher calls it {expected}"
        drawn = first.seed - first.experiment + 1
        if drawn >= 0 and begin.seed != (expected_seed := experiment_seed(drawn, begin.experiment)):
            yield f"{about} has the seed {begin.seed}, a launcher counts on from the first: {expected_seed}"
        if run.end is not None:
            for text in _end_contradictions(run.end):
                yield f"{about} {text}"
            if _ms(run.end.time) < _ms(begin.time) - CLOCKS_MS:
                yield f"{about} ended at {run.end.time}, before it began at {begin.time}"
    yield from _order_contradictions(series, where)


def _order_contradictions(series: Series, where: Path) -> Iterator[str]:
    """Yield a contradiction for each experiment that began before the one before it was over.

    Instances are launched together, and again together if none has reached ``run_start``.
    """
    groups: dict[int, list[Experiment]] = {}
    for run in series.experiments:
        groups.setdefault((run.begin.experiment - 1) // series.instances, []).append(run)
    for together in groups.values():
        over = min((run for run in together if run.end is not None), key=_ended, default=None)
        for run in together:
            if over is not None and over is not run and _ended(over) < _ms(run.begin.time) - CLOCKS_MS:
                yield (
                    f"{where}: instance {run.begin.experiment} began at {run.begin.time}, after instance "
                    f"{over.begin.experiment} was over: a launcher starts all instances together"
                )
    for earlier, later in pairwise(groups.values()):
        before, after = max(earlier, key=_ended), later[0]
        ended = before.begin.time if before.end is None else before.end.time
        if _ms(after.begin.time) < _ended(before) - CLOCKS_MS:
            yield (
                f"{where}: experiment {after.begin.experiment} began at {after.begin.time}, before experiment "
                f"{before.begin.experiment} was over at {ended}: a launcher runs one after the other"
            )


def _ended(run: Experiment) -> float:
    """Return the time of the end of an experiment in milliseconds, or of its begin if its end is not recorded."""
    return _ms(run.begin.time if run.end is None else run.end.time)


def _name(begin: Begin) -> str:
    return f"{begin.series}_{begin.experiment}"


def _ms(time: str) -> float:
    return 1000 * datetime.datetime.fromisoformat(time).timestamp()


def _end_contradictions(end: End) -> Iterator[str]:
    """Yield contradictions between exit code, status, time and verdict of an experiment.

    A successful run may have any exit code except ``NOT_CONVERGED``, because its machine may fail during shutdown.
    """
    wrong = {"success": (NOT_CONVERGED,), "aborted": (0,), "not started": (0, NOT_CONVERGED)}[end.status]
    if end.exit_code in wrong:
        yield f"has the exit code {end.exit_code}, which no run has that ends as {end.status}"
    if end.exit_code is None and not end.reason:
        yield "has neither an exit code nor a reason why the launcher does not know it"
    if (end.minutes is None) != (end.status == "not started"):
        yield f"has {'no' if end.minutes is None else 'a'} time in minutes, but the status {end.status}"
    kind = kind_of(end.verdict)
    if kind is None or kind == "submittable":
        yield f"has the verdict {end.verdict[:80]!a}, which no log has"
    elif (end.status == "aborted" and kind == "valid run") or (end.status == "not started" and kind != "refused"):
        yield f"has the verdict {kind}, but the status {end.status}"


def kind_of(verdict: str) -> VerdictKind | None:
    """Return the kind of verdict with which the text of an ``end`` line begins; None if there is none."""
    kinds: tuple[VerdictKind, ...] = ("refused", "format", "valid run", "submittable")
    return next((kind for kind in kinds if verdict == kind or verdict.startswith(f"{kind}: ")), None)


def log_contradictions(series: Series, run: Experiment, log: ParsedLog) -> Iterator[str]:
    """Yield, as sentences, contradictions between the log of a run and ``run``, its lines in ``runs.jsonl``."""
    where = f"{series.folder / RUNS_FILE} has"
    begin, end = run.begin, run.end
    number = f"for experiment {begin.experiment}"
    for seed in dict.fromkeys(repr(seed) for _, _, seed in log.seeds):
        if seed != repr(begin.seed):
            yield f"{log.path}: has the seed {seed[:80]}, {where} {begin.seed} {number}"
    if not log.seeds:
        yield f"{log.path}: has no seed, {where} {begin.seed} {number}"
    for event in log.all("ruleset"):
        if event.value != begin.ruleset:
            yield f"{log.path}: was logged under the ruleset {_shown(event.value)}, {where} {begin.ruleset} {number}"
    named = _log_name(begin)
    if named is None:
        yield f"{where} the benchmark {begin.benchmark} {number}, which ruleset {begin.ruleset} does not accept"
    elif log.benchmark != named:
        yield f"{log.path}: is of the benchmark {_shown(log.benchmark)}, {where} {begin.benchmark} {number}"
    yield from _scale_contradictions(log, begin, f"{where} the scale {begin.scale} {number}")
    yield from _time_contradictions(log, run)
    if end is None:
        return
    if log.status is not None and log.status != end.status:
        yield f"{log.path}: run_stop says {_shown(log.status)}, {where} {end.status} {number}"
    minutes = log.run_minutes
    if minutes is not None and end.minutes is not None and abs(minutes - end.minutes) > MINUTES:
        yield f"{log.path}: its run took {minutes:.5f} minutes, {where} {end.minutes:.5f} {number}"


def verdict_contradiction(run: Experiment, log: ParsedLog, now: VerdictKind) -> str | None:
    """Return a message if the log was a valid run when the run ended and is not now, or the reverse; else None.

    Other changes are ignored: a newer suite may have stricter rules. If the log is refused now, its own verdict gives
    the reasons.
    """
    recorded = kind_of(run.end.verdict) if run.end is not None else None
    if recorded is None or now == "refused" or (recorded == "valid run") == (now == "valid run"):
        return None
    return (
        f"{log.path}: is {_article(now)} now, {RUNS_FILE} says that it was {_article(recorded)} when experiment "
        f"{run.begin.experiment} ended: the log was changed"
    )


def _article(kind: VerdictKind) -> str:
    return {"valid run": "a valid run", "format": "of the right format only"}.get(kind, kind)


def _log_name(begin: Begin) -> str | None:
    try:
        return rules_for(begin.benchmark, begin.ruleset).log_name
    except ConfigError:
        return None


def _scale_contradictions(log: ParsedLog, begin: Begin, recorded: str) -> Iterator[str]:
    """Yield contradictions in the number of nodes, and of accelerators per node (0 in the log of a CPU-only run)."""
    nodes, _, ranks = begin.scale.partition("x")
    for key, allowed in (("number_of_nodes", (int(nodes),)), ("accelerators_per_node", (int(ranks), 0))):
        for event in log.all(key):
            if isinstance(event.value, bool) or event.value not in allowed:
                yield f"{log.path}: {key} is {_shown(event.value)}, {recorded}"


def _time_contradictions(log: ParsedLog, run: Experiment) -> Iterator[str]:
    """Yield a message for the first event before the experiment began, and for the first after it ended."""
    begin, end = run.begin.time, run.end.time if run.end is not None else None
    early = next((event for event in log.events if event.time_ms < _ms(begin) - CLOCKS_MS), None)
    if early is not None:
        yield (
            f"{log.path}: {early.key} in line {early.line} is earlier than {begin}, when {RUNS_FILE} has experiment "
            f"{run.begin.experiment} begin"
        )
    late = next((each for each in log.events if end is not None and each.time_ms > _ms(end) + CLOCKS_MS), None)
    if late is not None:
        yield (
            f"{log.path}: {late.key} in line {late.line} is later than {end}, when {RUNS_FILE} has experiment "
            f"{run.begin.experiment} end"
        )


def _shown(value: object) -> str:
    return ascii(value)[:80]
