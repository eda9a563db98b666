"""Values that the closed division fixes beyond the logged hyperparameters, checked before a run on real data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from omegaconf import OmegaConf

from common.config.loading import build
from common.config.schema import BenchmarkConfig
from common.config.yaml_files import CONFIGS
from common.errors import ConfigError

Facts = TypeVar("Facts")

FIXED = ("train_samples", "eval_samples")
UNCONSTRAINED = frozenset({("rnnt", "train_samples")})
"""Benchmark and entry of FIXED that the rules leave free. RNN-T trains on utterances of at most
``data_train_max_duration``. The rules do not constrain this duration, so the number of utterances is free too."""
FIXED_SECTIONS = ("facts", "schedule")
"""Sections whose entries in ``configs/benchmark`` are fixed. A recipe may add entries, such as the first evaluation."""


def benchmark_settings(name: str) -> dict[str, Any]:
    """Return ``configs/benchmark/<name>.yaml``, before any recipe, as plain containers."""
    settings = OmegaConf.to_container(OmegaConf.load(CONFIGS / "benchmark" / f"{name}.yaml"), resolve=True)
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items()}


def fixed_facts(kind: type[Facts], name: str, **changes: object) -> Facts:
    """Return the dataset constants of ``configs/benchmark/<name>.yaml``, for code that runs without a recipe.

    Raises:
        ConfigError: a changed value is out of its range.
    """
    facts: Facts = build(kind, {**benchmark_settings(name)["facts"], **changes}, "benchmark.facts")
    return facts


def check_fixed(benchmark: BenchmarkConfig, forbidden: Sequence[str]) -> None:
    """Refuse a configuration on real data that differs from the values that the rules fix. Synthetic data are exempt.

    Callers check only runs of the closed division.

    Args:
        forbidden: violations that the workload reports (:class:`common.config.schema.Declaration`).

    Raises:
        ConfigError: naming every key, value and rule that is broken.
    """
    if benchmark.synthetic:
        return
    broken = [*_differences(benchmark), *forbidden]
    if broken:
        raise ConfigError(
            f"{benchmark.name}: the closed division forbids this configuration on real data:\n  "
            + "\n  ".join(broken)
            + "\n(submission.division=open skips these rules)"
        )


def _differences(benchmark: BenchmarkConfig) -> list[str]:
    source = f"configs/benchmark/{benchmark.name}.yaml"
    wanted = benchmark_settings(benchmark.name)
    pairs = [
        (name, getattr(benchmark, name), wanted[name]) for name in FIXED if (benchmark.name, name) not in UNCONSTRAINED
    ]
    for metric in {**wanted["targets"], **benchmark.targets}:
        found_target = benchmark.targets.get(metric)
        fixed_target: Mapping[str, Any] = wanted["targets"].get(metric, {})
        for part in ("value", "direction"):
            pairs.append((f"targets.{metric}.{part}", getattr(found_target, part, None), fixed_target.get(part)))
    for section in FIXED_SECTIONS:
        found: Mapping[str, Any] = getattr(benchmark, section)
        entries: Mapping[str, Any] = wanted[section]
        pairs += [(f"{section}.{name}", found.get(name), value) for name, value in entries.items()]
    return [
        f"benchmark.{name}={_text(found)}: the rules fix {_text(value)} ({source})"
        for name, found, value in pairs
        if found != value
    ]


def _text(value: object) -> str:
    """Return ``value`` as it is written in YAML and on the command line."""
    return "null" if value is None else str(value)
