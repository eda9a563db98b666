"""In-process use of mlperf-logging's RCP checker, for :mod:`common.mlperf.checker_worker`.

The checker searches text in whole lines and crashes on unexpected input. Untrusted logs therefore reach this module
only inside the worker process. :func:`smallest_acceptable_mean` is the checker's limit in closed form.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlperf_logging.rcp_checker import rcp_checker
from scipy import stats

from common.mlperf.compliance import CRASHES, quiet_logging
from common.mlperf.rcp import RcpResult, Reference, ReferencePoint, olympic_mean
from common.mlperf.rules import Rules

SIGNIFICANCE = 0.05
"""Significance level of the one-sided t-test; a faster mean with a smaller p-value is refused."""

LLAMA31_405B_TOLERANCE = 46_080
"""Samples by which Llama 3.1 405B may converge below the limit: one evaluation interval of v5.0, as in the checker."""


def reference_statistics(counts: Sequence[float], dropped: int = 1) -> tuple[float, float]:
    """Return mean and standard deviation of a reference's convergence counts, as the checker computes them.

    The mean is olympic. The deviation is the population standard deviation of all counts, including the dropped ones.
    The example in the rules excludes the dropped counts; we follow the checker.
    """
    return olympic_mean(counts, dropped), statistics.pstdev(counts)


def smallest_acceptable_mean(mean: float, stdev: float, reference_runs: int, submission_runs: int) -> float:
    """Return the smallest mean convergence of a submission that passes the RCP test, in the unit of ``mean``.

    One-sided two-sample t-test with pooled variance, ``stdev`` for both samples, p = 0.05: the limit is
    ``mean - t(0.95, n_ref + n_sub - 2) * stdev * sqrt(1 / n_ref + 1 / n_sub)`` and never below 0.

    Args:
        mean: olympic mean of the reference.
        reference_runs: runs of the reference that its mean keeps.
        submission_runs: runs of the submission that its mean keeps; the checker takes N - 2 for every benchmark.
    """
    quantile = float(stats.t.ppf(1 - SIGNIFICANCE, reference_runs + submission_runs - 2))
    return max(0.0, mean - quantile * stdev * math.sqrt(1 / reference_runs + 1 / submission_runs))


def find_reference(rules: Rules, global_batch: int) -> Reference | None:
    """Return the reference for ``global_batch`` samples after the checker's pruning; None beyond the largest RCP."""
    checker = _checker(rules)
    records = _by_batch(checker.pruned_rcp_data)
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


def find_points(rules: Rules) -> list[ReferencePoint]:
    """Return all RCPs before the checker's pruning, the smallest batch first."""
    found = []
    for batch, record in sorted(_by_batch(_checker(rules).rcp_data).items()):
        counts = sorted(record["Epochs to converge"])
        kept = counts[rules.dropped : len(counts) - rules.dropped]  # one RCP of GPT-3 has a damaged count
        found.append(ReferencePoint(batch, olympic_mean(counts, rules.dropped), statistics.stdev(kept)))
    return found


def _checker(rules: Rules) -> rcp_checker.RCP_Checker:
    with quiet_logging():
        return rcp_checker.RCP_Checker(rules.usage, rules.ruleset, rules.log_name, False)


def _by_batch(records: Mapping[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the records by batch; of several at one batch the first one counts, as in the checker."""
    return {int(record["BS"]): record for record in reversed(list(records.values()))}


def _statistics(record: dict[str, Any], rules: Rules) -> tuple[float, float]:
    return reference_statistics(record["Epochs to converge"], rules.dropped)


def run_rcp_test(logs: Sequence[Sequence[str]], rules: Rules) -> RcpResult:
    """Return the checker's outcome on the logs of one result, which are written to the working directory and removed.

    Args:
        logs: JSON objects of the events, one sequence per log.
    """
    folder = Path.cwd() / "rcp"
    folder.mkdir()
    try:
        for index, texts in enumerate(logs):
            content = "".join(f":::MLLOG {text.rstrip()}\n" for text in texts)
            Path(folder, f"result_{index}.txt").write_text(content, encoding="latin-1")
        with quiet_logging():
            passed, message, factor = rcp_checker.check_directory(
                str(folder), rules.usage, rules.ruleset, False, False, rcp_file=None, rcp_pass="pruned_rcps"
            )
    except CRASHES as error:
        return RcpResult(False, f"the RCP checker cannot judge: {type(error).__name__}: {error}", 1.0)
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    if not passed and message in ("RCP found", "RCP Interpolation"):
        message = f"the runs converge faster than chance allows ({message})"
    return RcpResult(bool(passed), str(message), float(factor))
