"""Scores of a set of runs, and the test against reference convergence points (RCPs).

The rules score N runs by the olympic mean of their times and compare their convergence with the reference's at the
same batch size: a set that converges faster than the reference by more than chance allows is refused, one that is
faster within chance has its time scaled up (training rules, RCPs and normalisation). The test itself is that of the
installed mlperf-logging; :func:`smallest_acceptable_mean` restates its limit in closed form.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mlperf_logging.rcp_checker import rcp_checker
from scipy import stats

from common.mlperf.compliance import CRASHES, quiet_logging
from common.mlperf.rules import rules_for

RCP_FOLDER = Path(rcp_checker.__file__).parent

SIGNIFICANCE = 0.05
"""p-value of the one-sided t-test at which a faster mean is no longer acceptable."""


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


def reference_statistics(counts: Sequence[float], dropped: int = 1) -> tuple[float, float]:
    """Mean and standard deviation of a reference's convergence counts, as the checker computes them.

    The mean is olympic; the deviation is the population's over all counts, the dropped ones included (the rules'
    own example leaves them out; the checker decides).
    """
    return olympic_mean(counts, dropped), statistics.pstdev(counts)


def smallest_acceptable_mean(mean: float, stdev: float, reference_runs: int, submission_runs: int) -> float:
    """The smallest mean of a submission's convergence that the RCP test passes, in the unit of ``mean``.

    One-sided two-sample t-test with pooled variance, ``stdev`` for both samples, p = 0.05: the limit is
    ``mean - t(0.95, n_ref + n_sub - 2) * stdev * sqrt(1 / n_ref + 1 / n_sub)`` and never below 0.

    Args:
        mean: the reference's olympic mean.
        stdev: the reference's standard deviation.
        reference_runs: runs of the reference that its mean keeps.
        submission_runs: runs of the submission that its mean keeps; the checker takes N - 2 for every benchmark.
    """
    quantile = float(stats.t.ppf(1 - SIGNIFICANCE, reference_runs + submission_runs - 2))
    return max(0.0, mean - quantile * stdev * math.sqrt(1 / reference_runs + 1 / submission_runs))


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
    """Whether the installed RCP checker can test ``benchmark`` under ``ruleset``.

    It has RCPs of the first DLRM, but no number of runs for it, and dies.
    """
    rules = rules_for(benchmark, ruleset)
    shipped = RCP_FOLDER / f"{rules.usage}_{ruleset}" / f"rcps_{rules.log_name}.json"
    return shipped.is_file() and rules.log_name in rcp_checker.submission_runs[rules.usage]


def check_convergence(
    paths: Sequence[Path], benchmark: str, ruleset: str, custom_rcps: TextIO | None = None
) -> RcpResult:
    """Run mlperf-logging's RCP test on the logs of one result.

    Args:
        paths: the logs of the N runs.
        benchmark: our name, or the name in the logs.
        ruleset: version of the RCPs.
        custom_rcps: JSON file of RCPs to use instead of the shipped ones.

    Returns:
        the outcome; ``passed`` is False, with the reason as message, where the checker has no RCPs or dies.
    """
    rules = rules_for(benchmark, ruleset)
    if custom_rcps is None and not has_rcps(benchmark, ruleset):
        return RcpResult(False, f"mlperf-logging has no RCPs of {rules.log_name} for ruleset {ruleset}", 1.0)
    with tempfile.TemporaryDirectory(prefix="rcp-") as folder:
        for index, path in enumerate(paths):
            shutil.copyfile(path, Path(folder) / f"result_{index}.txt")
        try:
            with quiet_logging():
                passed, message, factor = rcp_checker.check_directory(
                    folder, rules.usage, rules.ruleset, False, False, rcp_file=custom_rcps, rcp_pass="pruned_rcps"
                )
        except CRASHES as error:
            return RcpResult(False, f"the RCP checker cannot judge: {type(error).__name__}: {error}", 1.0)
    if not passed and message in ("RCP found", "RCP Interpolation"):
        message = f"the runs converge faster than chance allows ({message})"
    return RcpResult(bool(passed), str(message), float(factor))


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
