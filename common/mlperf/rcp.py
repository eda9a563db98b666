"""Scores of a set of runs, and the test against reference convergence points (RCPs).

The rules score N runs by the olympic mean of their times and compare their convergence with the reference's at the
same batch size: a set that converges faster than the reference by more than chance allows is refused, one that is
faster within chance has its time scaled up (training rules, RCPs and normalisation). The test itself is that of the
installed mlperf-logging, asked in a process of its own; :func:`reference_at` says what it compares with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlperf_logging

from common.mlperf.checker_process import CheckerStopped, one_checker_process
from common.mlperf.log_targets import checkpoint_scores, first_passing, targets_of
from common.mlperf.parsed_log import ParsedLog, evaluation_of
from common.mlperf.rules import Rules, rules_for

RCP_FOLDER = Path(mlperf_logging.__file__).parent / "rcp_checker"

WITHOUT_RUNS = frozenset({"dlrm", "minigo"})
"""Benchmarks of which the checker has no number of runs: it dies of them."""


def olympic_mean(values: Sequence[float], dropped: int = 1) -> float:
    """Mean of ``values`` without the ``dropped`` smallest and ``dropped`` largest; infinite ones count as largest.

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
    """What the reference's convergence allows at one global batch, in the benchmark's own unit.

    Attributes:
        mean: olympic mean of the reference; a set that converges faster has its score multiplied by
            ``mean / its own mean``.
        limit: smallest mean of a set that is accepted.
        found: whether there is an RCP of this batch, one between two others, or, for a batch smaller than all RCPs,
            the smallest RCP.
    """

    mean: float
    limit: float
    found: Literal["exact", "interpolated", "smallest"]


def reference_at(rules: Rules, global_batch: int) -> Reference | None:
    """The reference that the checker compares runs of ``global_batch`` samples with, after its pruning.

    Returns:
        None for a batch beyond all RCPs, and for a benchmark without any.

    Raises:
        CheckerStopped: the checker gave no answer.
    """
    if not has_rcps(rules.log_name, rules.ruleset):
        return None
    with one_checker_process() as checker:
        found = checker.ask("reference", benchmark=rules.log_name, ruleset=rules.ruleset, global_batch=global_batch)
    return None if found is None else Reference(**found)


def convergence_of(log: ParsedLog, rules: Rules) -> float | None:
    """How far a run had trained when it converged, as the RCP checker reads it, in ``rules.unit``.

    It is the progress of the last evaluation before ``run_stop``; of a benchmark that is scored offline that of the
    first checkpoint that meets its targets, which for other data than the benchmark's are those of the log. None for a
    run that did not end with success, or does not say.
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
        passed: whether the convergence is acceptable.
        message: the checker's words: which RCP was used, or why the test failed.
        factor: what the score is multiplied by; 1 unless the set converged faster than the reference.
    """

    passed: bool
    message: str
    factor: float


def has_rcps(benchmark: str, ruleset: str) -> bool:
    """Whether the installed RCP checker can test ``benchmark`` under ``ruleset``."""
    rules = rules_for(benchmark, ruleset)
    shipped = RCP_FOLDER / f"{rules.usage}_{rules.ruleset}" / f"rcps_{rules.log_name}.json"
    return shipped.is_file() and rules.log_name not in WITHOUT_RUNS


def check_convergence(
    logs: Sequence[ParsedLog], benchmark: str, ruleset: str, custom_rcps: str | None = None
) -> RcpResult:
    """The outcome of mlperf-logging's RCP test on the logs of one result.

    Args:
        logs: of the N runs.
        benchmark: our name, or the name in the logs.
        ruleset: version of the RCPs.
        custom_rcps: JSON of RCPs to use instead of the shipped ones.

    Returns:
        the outcome; ``passed`` is False, with the reason as message, where the checker has no RCPs, dies or gives no
        answer.
    """
    rules = rules_for(benchmark, ruleset)
    if custom_rcps is None and not has_rcps(benchmark, ruleset):
        return RcpResult(False, f"mlperf-logging has no RCPs of {rules.log_name} for ruleset {ruleset}", 1.0)
    try:
        with one_checker_process() as checker:
            outcome = checker.ask(
                "convergence",
                [_what_counts(log, rules) for log in logs],
                benchmark=rules.log_name,
                ruleset=rules.ruleset,
                custom_rcps=custom_rcps,
            )
    except CheckerStopped as error:
        return RcpResult(False, f"the RCP checker cannot judge: {error}", 1.0)
    return RcpResult(**outcome)


def _what_counts(log: ParsedLog, rules: Rules) -> ParsedLog:
    """The events that the RCP checker means: it searches their names in the text of all lines."""
    keys = ("submission_benchmark", "global_batch_size", rules.quality_key, "run_stop")
    return ParsedLog(log.path, tuple(event for event in log.events if event.key in keys))


@dataclass(frozen=True)
class Window:
    """N consecutive runs out of M.

    Attributes:
        start: index of the window's first run, from 0.
        runs: number of runs in it.
        score: olympic mean of its times in minutes; infinite if more runs failed than may.
    """

    start: int
    runs: int
    score: float

    @property
    def valid(self) -> bool:
        """Whether the window is a result: no more failed runs than olympic scoring drops."""
        return math.isfinite(self.score)


def pick_window(minutes: Sequence[float | None], runs: int, dropped: int = 1) -> Window:
    """The window of consecutive runs that the rules let a submitter choose from a longer series.

    It is the one whose olympic score is the median of all windows' scores; a failed run counts as infinitely slow.
    Between the two middle windows of an even number the slower is taken, and among equals the earliest. A median
    that is not valid makes the whole result invalid.

    Args:
        minutes: times of all runs in launch order; None for one that failed.
        runs: runs of a result, N.
        dropped: runs dropped at each end of a window.

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
