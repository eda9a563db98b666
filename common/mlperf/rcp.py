"""Scores of sets of runs, and the test against reference convergence points (RCPs).

The score of N runs is the olympic mean of their times. Their convergence is compared with the reference at the same
batch size. A set that is significantly faster than the reference is refused; if it is faster by chance, its time is
scaled up (training rules, RCPs and normalisation). The installed mlperf-logging runs the test in a separate process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlperf_logging

from common.mlperf.checker_process import CheckerStopped, one_checker_process
from common.mlperf.parsed_log import ParsedLog, evaluation_of
from common.mlperf.progress import checkpoint_scores, first_passing, targets_of
from common.mlperf.rules import Rules, rules_for

RCP_FOLDER = Path(mlperf_logging.__file__).parent / "rcp_checker"

WITHOUT_RUNS = frozenset({"dlrm", "minigo"})
"""Benchmarks on which the checker crashes, because it does not know their number of runs."""


def olympic_mean(values: Sequence[float], dropped: int = 1) -> float:
    """Return the mean of ``values`` without the ``dropped`` smallest and largest. Infinite values count as largest.

    Raises:
        ValueError: if nothing is left, or a value is NaN.
    """
    if len(values) <= 2 * dropped:
        raise ValueError(f"{len(values)} values leave nothing after dropping {dropped} at each end")
    if any(math.isnan(value) for value in values):
        raise ValueError(f"values contain NaN: {list(values)}")
    kept = sorted(values)[dropped : len(values) - dropped]
    return math.fsum(kept) / len(kept) if all(math.isfinite(value) for value in kept) else math.inf


@dataclass(frozen=True)
class Reference:
    """Convergence of the reference at one global batch, in the unit of the benchmark.

    Attributes:
        mean: olympic mean of the reference; a set that converges faster has its score multiplied by this mean divided
            by the set's mean.
        limit: smallest mean of a set that is accepted.
        found: ``exact`` for an RCP at this batch, ``interpolated`` between two RCPs, or ``smallest`` for the smallest
            RCP, which is used for a batch below all RCPs.
    """

    mean: float
    limit: float
    found: Literal["exact", "interpolated", "smallest"]


def reference_at(rules: Rules, global_batch: int) -> Reference | None:
    """Return the reference for runs with ``global_batch`` samples, after the checker's pruning.

    Returns:
        None for a batch beyond all RCPs, and for a benchmark without RCPs.

    Raises:
        CheckerStopped: the checker gave no answer.
    """
    if not has_rcps(rules.log_name, rules.ruleset):
        return None
    with one_checker_process() as checker:
        found = checker.ask("reference", benchmark=rules.log_name, ruleset=rules.ruleset, global_batch=global_batch)
    return None if found is None else Reference(**found)


@dataclass(frozen=True)
class ReferencePoint:
    """One reference convergence point, before the checker's pruning.

    Attributes:
        batch: global batch in samples.
        mean, stdev: mean and standard deviation of the progress at which a run of the reference converges, in the
            unit of the benchmark. Both ignore the runs that :func:`olympic_mean` drops.
    """

    batch: int
    mean: float
    stdev: float


def reference_points(rules: Rules) -> list[ReferencePoint]:
    """Return all RCPs of a benchmark, the smallest batch first; empty for a benchmark without RCPs.

    Raises:
        CheckerStopped: the checker gave no answer.
    """
    if not has_rcps(rules.log_name, rules.ruleset):
        return []
    with one_checker_process() as checker:
        found = checker.ask("points", benchmark=rules.log_name, ruleset=rules.ruleset)
    return [ReferencePoint(**each) for each in found]


def convergence_of(log: ParsedLog, rules: Rules) -> float | None:
    """Return the progress at which a run converged, as the RCP checker reads it, in ``rules.unit``.

    This is the progress of the last evaluation before ``run_stop``. With offline scoring, it is the progress of the
    first checkpoint that meets the targets of :func:`common.mlperf.progress.targets_of`. None if the run did not
    end with success or does not state its progress.
    """
    if log.status != "success":
        return None
    stop = log.all("run_stop")[-1]
    before = [event for event in log.events if event.key == rules.quality_key and event.line < stop.line]
    points = [point for event in before if (point := evaluation_of(event, rules.progress_key)) is not None]
    if rules.scored_offline:
        return first_passing(checkpoint_scores(log, rules), targets_of(log, rules))
    if not points or points[-1].progress_key != rules.progress_key or not math.isfinite(points[-1].progress):
        return None
    return round(points[-1].progress, 3) if rules.progress_key == "epoch_num" else points[-1].progress


@dataclass(frozen=True)
class RcpResult:
    """Outcome of the RCP test.

    Attributes:
        message: message of the checker: the RCP that it used, or why the test failed.
        factor: factor on the score; 1 unless the set converged faster than the reference.
    """

    passed: bool
    message: str
    factor: float


def has_rcps(benchmark: str, ruleset: str) -> bool:
    """Return whether the installed RCP checker can test ``benchmark`` under ``ruleset``."""
    rules = rules_for(benchmark, ruleset)
    shipped = RCP_FOLDER / f"{rules.usage}_{rules.ruleset}" / f"rcps_{rules.log_name}.json"
    return shipped.is_file() and rules.log_name not in WITHOUT_RUNS


def check_convergence(logs: Sequence[ParsedLog], benchmark: str, ruleset: str) -> RcpResult:
    """Return the outcome of mlperf-logging's RCP test on the logs of the N runs of a result.

    ``passed`` is False, with the reason as message, if the checker has no RCPs, crashes or gives no answer.
    """
    rules = rules_for(benchmark, ruleset)
    if not has_rcps(benchmark, ruleset):
        return RcpResult(False, f"mlperf-logging has no RCPs of {rules.log_name} for ruleset {ruleset}", 1.0)
    try:
        with one_checker_process() as checker:
            outcome = checker.ask(
                "convergence",
                [_what_counts(log, rules) for log in logs],
                benchmark=rules.log_name,
                ruleset=rules.ruleset,
            )
    except CheckerStopped as error:
        return RcpResult(False, f"the RCP checker cannot judge: {error}", 1.0)
    return RcpResult(**outcome)


def _what_counts(log: ParsedLog, rules: Rules) -> ParsedLog:
    """Return only the events that the RCP checker needs, because it searches for key names in the text of all lines."""
    keys = ("submission_benchmark", "global_batch_size", rules.quality_key, "run_stop")
    return ParsedLog(log.path, tuple(event for event in log.events if event.key in keys))


@dataclass(frozen=True)
class Window:
    """N consecutive runs out of M.

    Attributes:
        start: index of the window's first run, from 0.
        score: olympic mean of the times in minutes; infinite if too many runs failed.
    """

    start: int
    runs: int
    score: float

    @property
    def valid(self) -> bool:
        """Whether the window is a result: olympic scoring drops all of its failed runs."""
        return math.isfinite(self.score)


def pick_window(minutes: Sequence[float | None], runs: int, dropped: int = 1) -> Window:
    """Return the window of consecutive runs that the rules let a submitter choose from a longer series.

    This is the window whose olympic score is the median of all windows' scores; a failed run counts as infinitely
    slow. With an even number of windows, the slower of the two middle ones is taken; of equal ones, the earliest. A
    median that is not valid makes the whole result invalid.

    Args:
        minutes: times of all runs in launch order; None for a failed run.
        runs: number of runs of a result, N.

    Raises:
        ValueError: if there are fewer than ``runs`` times.
    """
    if len(minutes) < runs:
        raise ValueError(f"a result needs {runs} runs, got {len(minutes)}")
    times = [math.inf if value is None else value for value in minutes]
    windows = [
        Window(start, runs, olympic_mean(times[start : start + runs], dropped))
        for start in range(len(times) - runs + 1)
    ]
    ranked = sorted(windows, key=lambda window: (window.score, window.start))
    median = ranked[len(ranked) // 2].score
    return next(window for window in windows if window.score == median)
