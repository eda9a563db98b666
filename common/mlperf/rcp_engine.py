"""mlperf-logging's RCP checker, run in this process: what :mod:`common.mlperf.checker_worker` answers with.

It reads logs by searching text in whole lines and dies of what it does not expect; a stranger's log comes here in a
process of its own only. :func:`smallest_acceptable_mean` is its limit in closed form.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mlperf_logging.rcp_checker import rcp_checker
from scipy import stats

from common.mlperf.compliance import CRASHES, quiet_logging
from common.mlperf.rcp import RcpResult, Reference, olympic_mean
from common.mlperf.rules import Rules

SIGNIFICANCE = 0.05
"""p-value of the one-sided t-test at which a faster mean is no longer acceptable."""

LLAMA31_405B_TOLERANCE = 46_080
"""Samples by which Llama 3.1 405B may converge below the limit: one evaluation interval of v5.0 (the checker's own)."""


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


def find_reference(rules: Rules, global_batch: int) -> Reference | None:
    """The reference that the checker compares runs of ``global_batch`` samples with, after its pruning.

    Returns:
        None for a batch beyond all RCPs.
    """
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


def run_rcp_test(logs: Sequence[Sequence[str]], rules: Rules, custom_rcps: str | None) -> RcpResult:
    """The checker's outcome on the logs of one result, each the JSON objects of its lines; writes into the folder that
    this process works in, and cleans up."""
    folder = Path.cwd() / "rcp"
    folder.mkdir()
    try:
        for index, texts in enumerate(logs):
            content = "".join(f":::MLLOG {text.rstrip()}\n" for text in texts)
            Path(folder, f"result_{index}.txt").write_text(content, encoding="latin-1")
        custom = None if custom_rcps is None else io.StringIO(custom_rcps)
        with quiet_logging():
            passed, message, factor = rcp_checker.check_directory(
                str(folder), rules.usage, rules.ruleset, False, False, rcp_file=custom, rcp_pass="pruned_rcps"
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
