"""Published results of MLPerf Training, and the selection of those that a run may be compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from common.errors import ConfigError
from common.mlperf.rules import RULESETS, Rules, round_name, rules_for

TABLE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class PublishedResult:
    """One result of the closed division that MLCommons published.

    Attributes:
        benchmark: name of the benchmark in this suite.
        ruleset: version of the rules of the round.
        accelerator: model of the accelerators.
        chips: number of accelerators.
        minutes: score.
        model: server model; empty if unknown.
        id: number of the entry at MLCommons; empty if unknown.
        logs: folder of the logs in the round's public repository; empty if unknown.
    """

    benchmark: str
    ruleset: str
    submitter: str
    accelerator: str
    chips: int
    minutes: float
    model: str = ""
    id: str = ""
    logs: str = ""

    @property
    def name(self) -> str:
        """Name of the result: round, submitter and accelerators."""
        return f"{round_name(self.ruleset)} {self.submitter}, {self.chips:,} x {self.accelerator}"

    @property
    def source(self) -> str:
        """Origin of the result: round, entry, and logs or server model."""
        parts = [f"MLPerf Training {round_name(self.ruleset)}, closed division"]
        parts += [f"entry {self.id}"] if self.id else []
        parts += [self.logs or self.model] if self.logs or self.model else []
        return "; ".join(parts)


def same_task(one: Rules, other: Rules) -> bool:
    """Return whether times under both rules are comparable: same benchmark, and same ruleset or targets and unit."""
    if one.benchmark != other.benchmark:
        return False
    return one.ruleset == other.ruleset or (
        (one.targets, one.large_batch_targets, one.unit) == (other.targets, other.large_batch_targets, other.unit)
    )


def published_for(rules: Rules) -> list[PublishedResult]:
    """Return the published results of the benchmark from rounds with the same task, fastest first."""
    fitting = [
        result
        for result in _table()
        if result.benchmark == rules.benchmark and same_task(rules, rules_for(result.benchmark, result.ruleset))
    ]
    return sorted(fitting, key=lambda result: result.minutes)


def nearest(results: Sequence[PublishedResult], chips: int | None, count: int) -> list[PublishedResult]:
    """Return the ``count`` results with the most similar number of chips, preferring newer rounds; fastest first."""

    def distance(result: PublishedResult) -> tuple[float, float]:
        ratio = 1.0 if chips is None else max(result.chips / chips, chips / result.chips)
        return ratio, -float(round_name(result.ruleset)[1:])

    return sorted(sorted(results, key=distance)[:count], key=lambda result: result.minutes)


@cache
def _table() -> tuple[PublishedResult, ...]:
    versions = {round_name(version): version for version in RULESETS["training"]}
    entries = []
    for row in yaml.safe_load(TABLE.read_text())["results"]:
        name = row.pop("benchmark")
        try:
            version = versions[row.pop("round")]
            entries.append(PublishedResult(rules_for(name, version).benchmark, version, **row))
        except (KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"{TABLE}: the entry {name} {row} is wrong: {error}") from error
    return tuple(entries)
