"""Samples until the target is reached, by global batch, from the reference convergence points (RCPs).

The reference runs of an RCP give mean and spread at one batch. Between two batches, both are interpolated linearly, as
the RCP checker does. The checker first leaves out RCPs that converge slower than the interpolation between their
neighbours, so that no submission may be faster. Here all RCPs count, because the reference needs these samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from common.config.yaml_files import CONFIGS, read_small_yaml
from common.errors import ConfigError
from common.mlperf.progress import GPT3_SEQUENCE
from common.mlperf.rcp import ReferencePoint, reference_points
from common.mlperf.rules import Rules, round_name, rules_for
from common.planning.estimates import Convergence

INTERPOLATED = 0.05
"""Standard deviation of an interpolated mean per doubling from the RCP below to the RCP above, in the middle between
both, as a fraction. Each inner RCP, left out and interpolated from its neighbours, gives one error: of 67 such
errors, the root mean square gives 0.055, and the median 0.045."""


@cache
def curve_of(benchmark: str, ruleset: str | None = None) -> tuple[ReferencePoint, ...]:
    """Return the RCPs of a benchmark in samples, the smallest batch first; empty without RCPs.

    Args:
        benchmark: our name, or the name in logs of ``ruleset``.
        ruleset: version of the rules; None for the newest that accepts the benchmark.

    Raises:
        ConfigError: the benchmark is not known.
        CheckerStopped: the RCP checker gave no answer.
    """
    rules = rules_for(benchmark, ruleset)
    return tuple(_in_samples(point, rules) for point in reference_points(rules))


def batches_of(benchmark: str, ruleset: str | None = None) -> tuple[int, ...]:
    """Return the global batches with an RCP, ascending; see :func:`curve_of`."""
    return tuple(point.batch for point in curve_of(benchmark, ruleset))


def convergence_at(benchmark: str, global_batch: int, ruleset: str | None = None) -> Convergence:
    """Return the samples that a training with ``global_batch`` samples per step needs; see :func:`curve_of`.

    Raises:
        ConfigError: the benchmark has no RCPs, or the batch is below the smallest or above the largest.
    """
    curve = curve_of(benchmark, ruleset)
    rules = rules_for(benchmark, ruleset)
    of_round = f"RCPs of {rules.benchmark} in {round_name(rules.ruleset)}"
    unknown = "the samples until the target is reached are not known"
    if not curve:
        raise ConfigError(f"there are no {of_round}: {unknown}")
    if not curve[0].batch <= global_batch <= curve[-1].batch:
        listed = ", ".join(str(point.batch) for point in curve)
        raise ConfigError(f"global batch {global_batch} is outside the {of_round} ({listed}): {unknown}")
    found = interpolated(curve, global_batch)
    error = interpolation_error(curve, global_batch)
    return Convergence(
        global_batch, found.mean, found.stdev / found.mean, "interpolated" if error else "exact", interpolation=error
    )


def interpolation_error(points: Sequence[ReferencePoint], batch: int) -> float:
    """Return the standard deviation of the mean that :func:`interpolated` gives, as a fraction; 0 at a point.

    With the doublings a from the point below and b to the point above, it is ``INTERPOLATED * 4 a b / (a + b)``.
    """
    if any(point.batch == batch for point in points):
        return 0.0
    below = math.log2(batch / max(point.batch for point in points if point.batch < batch))
    above = math.log2(min(point.batch for point in points if point.batch > batch) / batch)
    return INTERPOLATED * 4 * below * above / (below + above)


def interpolated(points: Sequence[ReferencePoint], batch: int) -> ReferencePoint:
    """Return the point at ``batch``, which lies between the first and the last of ``points``; these are ascending."""
    above = next(index for index, point in enumerate(points) if point.batch >= batch)
    if points[above].batch == batch:
        return points[above]
    low, high = points[above - 1], points[above]
    part = (batch - low.batch) / (high.batch - low.batch)
    mean, stdev = ((1 - part) * a + part * b for a, b in ((low.mean, high.mean), (low.stdev, high.stdev)))
    return ReferencePoint(batch, mean, stdev)


def samples_per_unit(rules: Rules, batch: int) -> float:
    """Return the samples in one unit of the progress that the rules count, at a global batch."""
    if rules.unit in ("epoch", "epoch fraction"):
        path = CONFIGS / "benchmark" / f"{rules.benchmark}.yaml"
        return float(read_small_yaml(path, "the benchmark")["train_samples"])
    return {"samples": 1.0, "tokens": 1 / GPT3_SEQUENCE, "steps": float(batch)}[rules.unit]


def _in_samples(point: ReferencePoint, rules: Rules) -> ReferencePoint:
    factor = samples_per_unit(rules, point.batch)
    return ReferencePoint(point.batch, factor * point.mean, factor * point.stdev)
