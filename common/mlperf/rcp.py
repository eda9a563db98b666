"""Scores of a set of runs, and the test against reference convergence points (RCPs).

The rules score N runs by the olympic mean of their times and compare their convergence with the reference's at the
same batch size: a set that converges faster than the reference by more than chance allows is refused, one that is
faster within chance has its time scaled up (training rules, RCPs and normalisation). The test itself is that of the
installed mlperf-logging; :func:`reference_at` says what it compares with, its limit in closed form.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from mlperf_logging.rcp_checker import rcp_checker
from scipy import stats

from common.mlperf.compliance import CRASHES, quiet_logging
from common.mlperf.parsed_log import ParsedLog, evaluation_of
from common.mlperf.rules import Rules, rules_for

RCP_FOLDER = Path(rcp_checker.__file__).parent

SIGNIFICANCE = 0.05
"""p-value of the one-sided t-test at which a faster mean is no longer acceptable."""

LLAMA31_405B_TOLERANCE = 46_080
"""Samples by which Llama 3.1 405B may converge below the limit: one evaluation interval of v5.0 (the checker's own)."""


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
    """
    if not has_rcps(rules.log_name, rules.ruleset):
        return None
    with quiet_logging():
        checker = rcp_checker.RCP_Checker(rules.usage, rules.ruleset, rules.log_name, False)
    records = {int(record["BS"]): record for record in reversed(checker.pruned_rcp_data.values())}  # the first counts
    kept = int(checker.submission_runs) - 2
    below = max((batch for batch in records if batch <= global_batch), default=None)
    above = min((batch for batch in records if batch >= global_batch), default=None)
    if above is None:
        return None
    found: Literal["exact", "interpolated", "smallest"]
    if below is None or below == above:
        found = "smallest" if below is None else "exact"
        mean, stdev = _statistics(records[above], rules)
        runs = len(records[above]["Epochs to converge"]) - 2 * rules.dropped
    else:
        found = "interpolated"
        part = (global_batch - below) / (above - below)
        low, high = _statistics(records[below], rules), _statistics(records[above], rules)
        mean, stdev = ((1 - part) * a + part * b for a, b in zip(low, high, strict=True))
        runs = 2 * int(checker.submission_runs)
    limit = smallest_acceptable_mean(mean, stdev, runs, kept)
    if rules.benchmark == "llama31_405b":
        limit -= LLAMA31_405B_TOLERANCE
    return Reference(mean, limit, found)


def _statistics(record: dict[str, Any], rules: Rules) -> tuple[float, float]:
    return reference_statistics(record["Epochs to converge"], rules.dropped)


def convergence_of(log: ParsedLog, rules: Rules) -> float | None:
    """How far a run had trained when it converged, as the RCP checker reads it, in ``rules.unit``.

    It is the progress of the last evaluation before ``run_stop``; Stable Diffusion's is the first checkpoint that
    meets both targets. None for a run that did not end with success, or does not say.
    """
    if log.status != "success":
        return None
    stop = log.all("run_stop")[-1]
    before = [event for event in log.events if event.key == rules.quality_key and event.line < stop.line]
    points = [point for event in before if (point := evaluation_of(event)) is not None]
    if rules.benchmark == "stable_diffusion":
        scores: dict[float, dict[str, float]] = {}
        for point in points:
            scores.setdefault(point.progress, {}).update(point.values)
        names = {target.metric for target in rules.targets}
        passing = [at for at, found in scores.items() if names <= set(found) and rules.target_met(found, 0)]
        return min(passing, default=None)
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
