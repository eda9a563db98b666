"""Read the runs and sets of runs that the paths on the command line name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.errors import ConfigError, DataError
from common.launch.series import RUNS_FILE
from common.mlperf.parsed_log import LoggedEvaluation, ParsedLog, read_log
from common.mlperf.progress import targets_of
from common.mlperf.rcp import convergence_of
from common.mlperf.rules import QualityTarget, Rules, rules_for
from common.mlperf.verdict import Verdict, judge_log
from common.report.budget import Budget, budget_of
from common.report.markup import legible
from common.report.published_results import same_task
from common.report.steps import RankSteps, read_steps
from common.submission.run_sets import RESULT, RunSet, find_run_sets
from common.submission.score import ResultScore, score
from common.submission.tree_agreement import count_of
from common.untrusted.strict_json import read_json_object

LOG = "mlperf.log"
RESUMED_LOG = re.compile(r"mlperf_resumed_at_(\d{1,18})\.log")
MOST_METRICS = 4
NO_NAME = ("", "unset", "None")
LAST_MS = 4e12
"""Latest accepted time, in milliseconds since the epoch: the year 2096."""


@dataclass(frozen=True)
class ReportedRun:
    """One run.

    Attributes:
        name: short name for legends and tables.
        rules: rules of the benchmark in the ruleset that judges the run.
        start, stop: run_start and run_stop in seconds since the epoch; without run_stop, time of the last event.
        ranks: steps of each rank; empty without metrics.
        convergence: training until convergence, in the unit of the rules; None if the run did not converge.
    """

    name: str
    log: ParsedLog
    rules: Rules
    verdict: Verdict
    start: float
    stop: float
    ranks: tuple[RankSteps, ...]
    budget: Budget
    convergence: float | None

    @property
    def ended(self) -> bool:
        """Whether the log has a run_stop."""
        return bool(self.log.all("run_stop"))

    @property
    def status(self) -> str:
        """Status of the run: ``success``, ``aborted``, or ``no run_stop``."""
        return str(self.log.status) if self.ended else "no run_stop"

    @property
    def minutes(self) -> float:
        """Minutes from ``start`` to ``stop``."""
        return (self.stop - self.start) / 60

    @property
    def targets(self) -> tuple[QualityTarget, ...]:
        """Quality targets of the run. With custom or synthetic data, only those that the log states."""
        return targets_of(self.log, self.rules)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the quality metrics in the log, target metrics first, at most ``MOST_METRICS``."""
        found = dict.fromkeys(name for evaluation in self.log.evaluations for name in evaluation.values)
        named = [target.metric for target in self.rules.targets if target.metric in found]
        return tuple(dict.fromkeys([*named, *found]))[:MOST_METRICS]

    def quality(self, metric: str) -> list[tuple[float, float, float]]:
        """Return time in epoch seconds, progress, and value of every evaluation that has the metric."""
        return [
            (point.time_ms / 1000, point.progress, point.values[metric])
            for point in self.log.evaluations
            if metric in point.values
        ]

    @property
    def last(self) -> LoggedEvaluation | None:
        """Last evaluation; None if there is none."""
        return self.log.evaluations[-1] if self.log.evaluations else None


@dataclass(frozen=True)
class Subject:
    """A run or a set of runs: one item of the report.

    Attributes:
        runs: runs in launch order; at least one.
        score: score of a set; None for a single run.
        left_out: sentences about runs of the set that could not be read or never started.
        system: name of the system; empty if unknown.
        chips: number of accelerators; None if neither log nor doctor report it.
    """

    name: str
    runs: tuple[ReportedRun, ...]
    score: ResultScore | None
    left_out: tuple[str, ...]
    system: str
    chips: int | None

    @property
    def rules(self) -> Rules:
        """Rules that all runs are judged by."""
        return self.runs[0].rules

    @property
    def log(self) -> ParsedLog:
        """Log of the first run, for settings that all runs share."""
        return self.runs[0].log

    @property
    def other_data(self) -> str:
        """Description of the data if they are not the benchmark's; else empty."""
        return next((run.log.other_data for run in self.runs if run.log.other_data), "")


def gather(paths: Sequence[Path], ruleset: str | None = None) -> list[Subject]:
    """Return all runs and sets that the paths name; they are comparable.

    Args:
        paths: output_dirs of runs, logs, or results folders.
        ruleset: version to judge by; None for the version that a log states, or the newest that accepts it.

    Raises:
        DataError: a path contains no run, or a file is damaged.
        ConfigError: the runs are not comparable, or the ruleset does not accept them.
    """
    try:
        subjects = [subject for path in paths for subject in _subjects(path, ruleset)]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    require_comparable(subjects)
    return _told_apart(subjects)


def require_comparable(subjects: Sequence[Subject]) -> None:
    """Check that the results may be compared.

    Raises:
        ConfigError: benchmark, targets, division or data of two runs differ; the message names both and the difference.
    """
    runs = [run for subject in subjects for run in subject.runs]
    for one, other in pairwise(runs):
        pair = f"{one.log.path} and {other.log.path} cannot be compared"
        if one.rules.benchmark != other.rules.benchmark:
            raise ConfigError(f"{pair}: they are of {one.rules.benchmark} and {other.rules.benchmark}")
        if not same_task(one.rules, other.rules):
            both = f"rulesets {one.rules.ruleset} and {other.rules.ruleset}"
            units = one.rules.unit != other.rules.unit
            what = (
                f"{both} count in {one.rules.unit} and {other.rules.unit}" if units else f"the targets of {both} differ"
            )
            raise ConfigError(f"{pair}: {what}; judge both by one with --ruleset")
        if one.log.division != other.log.division:
            raise ConfigError(f"{pair}: one is of the {one.log.division} division, one of the {other.log.division}")
        if one.log.other_data != other.log.other_data:
            raise ConfigError(f"{pair}: in one of them alone {one.log.other_data or other.log.other_data}")
        sizes = [run.log.value("train_samples") for run in (one, other)]
        if one.log.other_data and None not in sizes and sizes[0] != sizes[1]:
            raise ConfigError(f"{pair}: their data differ, {sizes[0]} and {sizes[1]} training samples")


def _told_apart(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the subjects; those with equal names get a number."""
    names = Counter(subject.name for subject in subjects)
    seen: Counter[str] = Counter()
    apart = []
    for subject in subjects:
        seen[subject.name] += 1
        numbered = f"{subject.name} ({seen[subject.name]})" if names[subject.name] > 1 else subject.name
        apart.append(replace(subject, name=numbered))
    return apart


def _subjects(path: Path, ruleset: str | None) -> list[Subject]:
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.is_file():
        run = _run(path, _metrics_folder(path), _name_of(path), ruleset)
        return [_single(run)]
    if (path / RUNS_FILE).exists():
        return [_set(run_set, ruleset) for run_set in find_run_sets([path])]
    log = _log_in(path)
    if log is not None:
        return [_single(_run(log, path, path.resolve().name, ruleset))]
    try:
        return [_set(run_set, ruleset) for run_set in find_run_sets([path])]
    except DataError as error:
        if any(path.rglob(RUNS_FILE)) or any(path.rglob("result_*.txt")):
            raise
        raise DataError(
            f"{path}: holds neither {LOG}, as an output_dir does, nor {RUNS_FILE} or result_*.txt, as a folder of "
            "results does"
        ) from error


def _log_in(folder: Path) -> Path | None:
    """Return the log in an output_dir: that of the run, else that of the last resumed run, else None."""
    if (folder / LOG).exists():
        return folder / LOG
    numbered = {int(found[1]): path for path in folder.iterdir() if (found := RESUMED_LOG.fullmatch(path.name))}
    return numbered[max(numbered)] if numbered else None


def _metrics_folder(log: Path) -> Path | None:
    """Return the folder with the metrics of a log: its output_dir, or the folder named like a series' log; or None."""
    if log.name == LOG or RESUMED_LOG.fullmatch(log.name):
        return log.parent
    beside = log.with_suffix("")
    return beside if beside != log and beside.is_dir() else None


def _name_of(log: Path) -> str:
    folder = log.resolve().parent.name
    if log.name == LOG or RESUMED_LOG.fullmatch(log.name):
        return folder
    return f"{folder}/{log.stem}" if RESULT.fullmatch(log.name) else log.stem


def _run(path: Path, metrics: Path | None, name: str, ruleset: str | None) -> ReportedRun:
    log = read_log(path)
    starts, stops = log.all("run_start"), log.all("run_stop")
    if not isinstance(log.benchmark, str):
        raise DataError(f"{path}: the log does not name its benchmark (submission_benchmark)")
    if not starts:
        raise DataError(f"{path}: has no run_start: the run never started its clock, so there is nothing to report")
    verdict = judge_log(log, ruleset)
    rules = rules_for(log.benchmark, ruleset or verdict.ruleset)
    start = starts[0].time_ms
    stop = stops[-1].time_ms if stops else max(event.time_ms for event in log.events)
    if not 0 <= start <= stop <= LAST_MS:
        raise DataError(f"{path}: the clock starts at {start:g} and stops at {stop:g} ms since 1970: no run did that")
    ranks = read_steps(metrics, start / 1000, stop / 1000) if metrics is not None else ()
    return ReportedRun(
        name=legible(name),
        log=log,
        rules=rules,
        verdict=verdict,
        start=start / 1000,
        stop=stop / 1000,
        ranks=ranks,
        budget=budget_of(log, round(start), round(stop), ranks),
        convergence=convergence_of(log, rules),
    )


def _single(run: ReportedRun) -> Subject:
    chips = _logged_chips(run.log)
    return Subject(run.name, (run,), None, (), _system(run.log, None, chips), chips)


def _set(run_set: RunSet, ruleset: str | None) -> Subject:
    runs, left_out = [], list(run_set.notes)
    experiments = run_set.series.experiments if run_set.series is not None else ()
    folders = {run.log: run.folder / run.begin.output_dir for run in experiments}
    result = score(run_set, ruleset)
    version = ruleset or (None if result.rules is None else result.rules.ruleset)
    for number, log in zip(run_set.numbers, run_set.logs, strict=True):
        try:
            runs.append(_run(log, folders.get(log, _metrics_folder(log)), f"run {number}", version))
        except DataError as error:
            left_out.append(str(error))
    if not runs:
        reasons = "; ".join(left_out) or "the set is empty"
        raise DataError(f"{run_set.name}: holds no run that can be drawn: {reasons}")
    facts = _doctor_facts(run_set)
    chips = _logged_chips(runs[0].log) or _doctor_chips(facts)
    series = run_set.series
    name = f"{series.folder.resolve().name}/{series.name}" if series is not None else Path(run_set.name).resolve().name
    return Subject(legible(name), tuple(runs), result, tuple(left_out), _system(runs[0].log, facts, chips), chips)


def _doctor_facts(run_set: RunSet) -> list[dict[str, Any]]:
    """Return the facts that `doctor` recorded for each node of a series; empty without a report of `doctor`."""
    if run_set.series is None or not run_set.series.doctors:
        return []
    path = run_set.series.doctors[0]
    try:
        nodes = read_json_object(path)["nodes"]
        return [dict(node["facts"]) for node in nodes.values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: is no report of doctor: {error}") from error


def _logged_chips(log: ParsedLog) -> int | None:
    """Return the number of accelerators, which logs of newer rounds state; else None."""
    nodes, each = log.value("number_of_nodes"), log.value("accelerators_per_node")
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) else None  # 0: a run on CPUs


def _doctor_chips(facts: Sequence[dict[str, Any]]) -> int | None:
    counts = [count_of(node.get("accelerators_per_node")) for node in facts]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _system(log: ParsedLog, facts: Sequence[dict[str, Any]] | None, chips: int | None) -> str:
    platform = str(log.value("submission_platform"))
    if platform not in NO_NAME:
        return platform
    models = sorted({str(node.get("accelerator_model_name", "")) for node in facts or ()} - {""})
    if chips:
        return f"{chips} x {', '.join(models)}" if models else f"{chips} accelerators"
    nodes = log.value("number_of_nodes")
    if chips == 0:
        return f"the CPUs of {nodes} nodes" if isinstance(nodes, int) and nodes > 1 else "a CPU"
    return ""
