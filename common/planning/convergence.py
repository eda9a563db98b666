"""Samples until the target is reached, by global batch, from the reference convergence points (RCPs).

The reference runs of an RCP give mean and spread at one batch. Between two batches, both are interpolated linearly, as
the RCP checker does. Like the checker, :func:`_pruned` leaves out RCPs that converge slower than the interpolation
between their neighbours. All values are samples; the checker compares in the unit of the benchmark. In that of Stable
Diffusion up to v3.1 (steps), it would keep only the largest batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.errors import ConfigError
from common.mlperf.progress import GPT3_SEQUENCE
from common.mlperf.rcp import ReferencePoint, reference_points
from common.mlperf.rules import Rules, round_name, rules_for


@dataclass(frozen=True)
class Convergence:
    """Samples that training needs at each global batch.

    Attributes:
        benchmark: our name of the benchmark.
        ruleset: version of the rules whose RCPs these are.
        points: RCPs after pruning, in samples, the smallest batch first; at least one.
    """

    benchmark: str
    ruleset: str
    points: tuple[ReferencePoint, ...]

    @classmethod
    def from_rcps(cls, benchmark: str, train_samples: int, ruleset: str | None = None) -> Convergence:
        """Return the convergence of a benchmark from the installed RCPs.

        Args:
            benchmark: our name, or the name in logs of ``ruleset``.
            train_samples: samples of an epoch.
            ruleset: version of the rules; None for the newest that accepts the benchmark.

        Raises:
            ConfigError: the benchmark is not known or has no RCPs.
            CheckerStopped: the RCP checker gave no answer.
        """
        rules = rules_for(benchmark, ruleset)
        found = [_in_samples(point, rules, train_samples) for point in reference_points(rules)]
        if not found:
            raise ConfigError(
                f"{rules.benchmark}: mlperf-logging has no RCPs for {round_name(rules.ruleset)}, so the samples until "
                "the target is reached are not known"
            )
        return cls(rules.benchmark, rules.ruleset, tuple(_pruned(found)))

    @property
    def batches(self) -> tuple[int, ...]:
        """Global batches with an RCP, ascending."""
        return tuple(point.batch for point in self.points)

    def at(self, batch: int) -> ReferencePoint:
        """Return mean and standard deviation of the samples of one run at a global batch.

        Raises:
            ConfigError: the batch is below the smallest or above the largest RCP.
        """
        below = max((point for point in self.points if point.batch <= batch), key=_batch, default=None)
        above = min((point for point in self.points if point.batch >= batch), key=_batch, default=None)
        if below is None or above is None:
            first, last = self.batches[0], self.batches[-1]
            raise ConfigError(
                f"{self.benchmark}: global batch {batch} is outside the RCPs of {round_name(self.ruleset)}, which are "
                f"from {first} to {last}: the samples until the target is reached are not known"
            )
        return below if below is above else _between(below, above, batch)

    def without(self, batch: int) -> Convergence:
        """Return the convergence without the RCP at ``batch``, to compare that RCP with the interpolation."""
        return replace(self, points=tuple(point for point in self.points if point.batch != batch))


def _batch(point: ReferencePoint) -> int:
    return point.batch


def _in_samples(point: ReferencePoint, rules: Rules, train_samples: int) -> ReferencePoint:
    factor = {
        "samples": 1.0,
        "tokens": 1 / GPT3_SEQUENCE,
        "steps": float(point.batch),
        "epoch": float(train_samples),
        "epoch fraction": float(train_samples),
    }[rules.unit]
    return ReferencePoint(point.batch, factor * point.mean, factor * point.stdev)


def _between(low: ReferencePoint, high: ReferencePoint, batch: int) -> ReferencePoint:
    part = (batch - low.batch) / (high.batch - low.batch)
    return ReferencePoint(batch, (1 - part) * low.mean + part * high.mean, (1 - part) * low.stdev + part * high.stdev)


def _pruned(points: Sequence[ReferencePoint]) -> list[ReferencePoint]:
    """Leave out points above the interpolation between their neighbours, in the order in which the checker does."""
    kept = list(points)
    index = 1
    while index < len(kept) - 1:
        if kept[index].mean > _between(kept[index - 1], kept[index + 1], kept[index].batch).mean:
            del kept[index]
        else:
            index += 1
    return kept
