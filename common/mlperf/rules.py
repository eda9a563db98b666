"""Rules of each benchmark in each round: target, runs, scoring, units, names and accepting rulesets.

Sources: MLCommons training_policies (training_rules, sections on quality targets, evaluation and results),
hpc_training_rules v3.0, and the rulesets of mlperf-logging 4.1.68. If they differ, mlperf-logging decides. A ruleset
is a version such as ``"4.0.0"``. HPC and training rulesets share versions; the benchmark determines which is meant.

Our name of a benchmark is its name in the newest ruleset that accepts it. Other names from logs are accepted too
(``gnn`` for rgat, ``ssd`` for retinanet up to 4.1.0). SSD300, which older logs call ``ssd``, is ``ssd300``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from common.errors import ConfigError

Usage = Literal["training", "hpc"]
Direction = Literal["at_least", "at_most"]
_T = TypeVar("_T")

RULESETS: dict[Usage, tuple[str, ...]] = {
    "training": (
        "0.7.0",
        "1.0.0",
        "1.1.0",
        "2.0.0",
        "2.1.0",
        "3.0.0",
        "3.1.0",
        "4.0.0",
        "4.1.0",
        "5.0.0",
        "5.1.0",
        "6.0.0",
        "6.1.0",
    ),
    "hpc": ("1.0.0", "2.0.0", "3.0.0"),
}
"""Rulesets that the suite knows, oldest first."""

PUBLISHED: dict[Usage, dict[str, str]] = {
    "training": {
        "0.7.0": "2020-07-29",
        "1.0.0": "2021-06-30",
        "1.1.0": "2021-12-01",
        "2.0.0": "2022-06-29",
        "2.1.0": "2022-11-09",
        "3.0.0": "2023-06-27",
        "3.1.0": "2023-11-08",
        "4.0.0": "2024-06-12",
        "4.1.0": "2024-11-13",
        "5.0.0": "2025-06-04",
        "5.1.0": "2025-11-12",
        "6.0.0": "2026-06-16",
    },
    "hpc": {"1.0.0": "2021-11-17", "2.0.0": "2022-11-09", "3.0.0": "2023-11-08"},
}
"""Ruleset -> day on which MLCommons published the results of its round (press releases)."""

OPEN_ROUNDS: dict[Usage, str | None] = {"training": "6.1.0", "hpc": None}
"""Round that accepts submissions. There has been no HPC round since v3.0."""


@dataclass(frozen=True)
class QualityTarget:
    """A quality target.

    Attributes:
        direction: whether quality must be at least or at most ``value``.
        metric: entry of the logged dict, or ``metric`` metadata, to which the target applies; empty for a plain
            number.
        bound: limit beyond which better values are not plausible (the checker's second bound); None for no limit.
        bound_allowed: whether ``bound`` itself is plausible.
        target_allowed: whether ``value`` itself meets the target.
    """

    value: float
    direction: Direction
    metric: str = ""
    bound: float | None = None
    bound_allowed: bool = False
    target_allowed: bool = True

    def met(self, quality: float) -> bool:
        """Return whether ``quality`` meets the target; NaN never does."""
        sign = 1.0 if self.direction == "at_least" else -1.0
        margin = sign * (quality - self.value)
        if not (margin > 0 or (margin == 0 and self.target_allowed)):
            return False
        if self.bound is None:
            return True
        distance = sign * (self.bound - quality)
        return distance > 0 or (distance == 0 and self.bound_allowed)


@dataclass(frozen=True)
class Rules:
    """Rules of one benchmark in one ruleset.

    Attributes:
        benchmark: our name of the benchmark.
        log_name: value of ``submission_benchmark`` in this ruleset.
        targets: targets that one evaluation must meet together.
        large_batch_targets: smallest global batch for which other targets hold, and those targets; None if all
            batches have the same targets.
        quality_key: log key of the event that reports quality.
        progress_key: metadata key for the training progress at an evaluation.
        dropped: runs that olympic scoring drops at each end.
        non_converged: runs of a result that may miss the target.
        init_minutes: longest untimed initialisation in the closed division, minutes.
        accepted_by: all rulesets that accept the benchmark, oldest first.
        scored_offline: checkpoints are scored apart from the training. Scoring is not timed; the run ends at the time
            of the first checkpoint that meets the targets.
        quality_together: whether all metrics of an evaluation are one event, whose value is an object; else each
            metric has its own event.
    """

    benchmark: str
    log_name: str
    ruleset: str
    usage: Usage
    targets: tuple[QualityTarget, ...]
    large_batch_targets: tuple[int, tuple[QualityTarget, ...]] | None
    quality_key: str
    progress_key: str
    unit: str
    runs: int
    dropped: int
    non_converged: int
    init_minutes: float
    accepted_by: tuple[str, ...]
    scored_offline: bool = False
    quality_together: bool = False

    @property
    def last_round(self) -> str:
        """Name of the newest round that accepts the benchmark, such as ``"v4.0"``."""
        return round_name(self.accepted_by[-1])

    @property
    def staging_timed(self) -> bool:
        """Whether copying the data to faster storage belongs to the measured time, as everywhere but in HPC v3.0."""
        return self.usage != "hpc" or version_key(self.ruleset) < (3,)

    @property
    def scored_in_any_order(self) -> bool:
        """Whether checkpoints may be scored in any order, and not all of them; generations come in their order."""
        return self.scored_offline and self.unit != "generation"

    @property
    def fractions_from(self) -> int:
        """Progress at the start of a log that counts fractions of epochs: 1 for the first DLRM, else 0."""
        return 1 if self.benchmark == "dlrm" else 0

    @property
    def retired(self) -> bool:
        """Whether the round that accepts submissions no longer has the benchmark."""
        return self.accepted_by[-1] != OPEN_ROUNDS[self.usage]

    def targets_at(self, global_batch: int) -> tuple[QualityTarget, ...]:
        """Return the targets at a global batch, in samples."""
        if self.large_batch_targets is not None and global_batch >= self.large_batch_targets[0]:
            return self.large_batch_targets[1]
        return self.targets

    def meets_target(self, values: Mapping[str, float], global_batch: int) -> bool:
        """Return whether one evaluation meets every target; see :func:`all_met`."""
        return all_met(self.targets_at(global_batch), values)


def all_met(targets: Sequence[QualityTarget], values: Mapping[str, float]) -> bool:
    """Return whether one evaluation meets every target; False if a metric with a target is missing.

    Args:
        values: metric name to value; a benchmark with one metric may use any single name.
    """
    for target in targets:
        quality = values.get(target.metric)
        if quality is None and len(targets) == len(values) == 1:
            quality = next(iter(values.values()))
        if quality is None or not target.met(quality):
            return False
    return True


def version_key(ruleset: str) -> tuple[int, ...]:
    """Return a sort key of rulesets, oldest first. As text, 10.0.0 would come before 2.0.0."""
    return tuple(int(part) for part in ruleset.split("."))


def round_name(ruleset: str) -> str:
    """Return the name of a round in tables: ``"v4.0"`` for ``"4.0.0"``."""
    return "v" + ".".join(ruleset.split(".")[:2])


def round_names(rulesets: Iterable[str]) -> list[str]:
    """Return the names of the rounds of rulesets, oldest first, each once."""
    return list(dict.fromkeys(round_name(ruleset) for ruleset in sorted(rulesets, key=version_key)))


@dataclass(frozen=True)
class _Benchmark:
    """All rounds of one benchmark. An entry of a dict with ruleset keys holds from that ruleset on."""

    log_names: dict[str, str]
    first: str
    last: str
    targets: dict[str, tuple[QualityTarget, ...]]
    runs: int
    unit: dict[str, str]
    progress_key: dict[str, str]
    usage: Usage = "training"
    quality_key: str = "eval_accuracy"
    dropped: int = 1
    non_converged: int = 1
    init_minutes: float = 30.0
    large_batch_targets: dict[str, tuple[int, tuple[QualityTarget, ...]] | None] | None = None
    scored_offline: bool = False
    quality_together: bool = False


def _at_least(value: float, bound: float | None = 1.0, metric: str = "", bound_allowed: bool = False) -> QualityTarget:
    return QualityTarget(value, "at_least", metric, bound, bound_allowed)


def _at_most(value: float, bound: float | None = 0.0, metric: str = "", bound_allowed: bool = False) -> QualityTarget:
    return QualityTarget(value, "at_most", metric, bound, bound_allowed)


def _of(
    log_name: str | dict[str, str],
    first: str,
    last: str,
    target: QualityTarget | tuple[QualityTarget, ...] | dict[str, tuple[QualityTarget, ...]],
    runs: int,
    unit: str | dict[str, str],
    key: str | dict[str, str],
    **others: Any,
) -> _Benchmark:
    """Return a benchmark; values that are no dict hold in all its rulesets. ``others``: further fields."""
    targets = (target,) if isinstance(target, QualityTarget) else target
    return _Benchmark(
        log_names={first: log_name} if isinstance(log_name, str) else log_name,
        first=first,
        last=last,
        targets=targets if isinstance(targets, dict) else {first: targets},
        runs=runs,
        unit={first: unit} if isinstance(unit, str) else unit,
        progress_key={first: key} if isinstance(key, str) else key,
        **others,
    )


OPEN_QUALITY = "averaged_validation_loss"
"""Further key of the metric, which the rule files of the open division require of FLUX.1."""

BENCHMARKS: dict[str, _Benchmark] = {
    "resnet": _of("resnet", "0.7.0", "4.0.0", _at_least(0.759), 5, "epoch", "epoch_num"),
    "ssd300": _of("ssd", "0.7.0", "1.1.0", _at_least(0.23), 5, "epoch", "epoch_num"),
    "retinanet": _of(
        {"2.0.0": "ssd", "5.0.0": "retinanet"}, "2.0.0", "5.1.0", _at_least(0.34), 5, "epoch", "epoch_num"
    ),
    "maskrcnn": _of(
        "maskrcnn",
        "0.7.0",
        "3.1.0",
        (_at_least(0.377, metric="BBOX"), _at_least(0.339, metric="SEGM")),
        5,
        "epoch",
        "epoch_num",
        quality_together=True,
    ),
    "unet3d": _of(
        "unet3d",
        "1.0.0",
        "4.0.0",
        _at_least(0.908, bound=None),
        40,
        {"1.0.0": "epoch", "3.1.0": "samples"},
        "epoch_num",
        dropped=4,
        non_converged=4,
    ),
    "rnnt": _of("rnnt", "1.0.0", "3.1.0", _at_most(0.058), 10, "epoch", "epoch_num"),
    "bert": _of(
        "bert",
        "0.7.0",
        "5.0.0",
        {"0.7.0": (_at_least(0.712),), "1.0.0": (_at_least(0.72),)},
        10,
        "samples",
        "epoch_num",
        large_batch_targets={"0.7.0": (8192, (_at_least(0.706),)), "1.0.0": None},
    ),
    "dlrm": _of("dlrm", "0.7.0", "2.1.0", _at_least(0.8025), 5, "epoch fraction", "epoch_num"),
    "dlrm_dcnv2": _of(
        "dlrm_dcnv2",
        "3.0.0",
        "6.0.0",
        _at_least(0.80275, bound_allowed=True),
        10,
        "epoch fraction",
        "epoch_num",
    ),
    "gpt3": _of("gpt3", "3.0.0", "4.1.0", _at_most(2.69, bound=2.6), 3, "tokens", "epoch_num", init_minutes=60.0),
    "stable_diffusion": _of(
        "stable_diffusion",
        "3.1.0",
        "5.0.0",
        (_at_most(90.0, metric="FID", bound_allowed=True), _at_least(0.15, metric="CLIP", bound_allowed=True)),
        10,
        {"3.1.0": "steps", "4.0.0": "samples"},
        {"3.1.0": "step_num", "4.0.0": "samples_count"},
        scored_offline=True,
    ),
    "llama2_70b_lora": _of("llama2_70b_lora", "4.0.0", "6.1.0", _at_most(0.925), 10, "samples", "samples_count"),
    "rgat": _of(
        {"4.0.0": "gnn", "5.0.0": "rgat"}, "4.0.0", "5.1.0", _at_least(0.72), 10, "epoch fraction", "epoch_num"
    ),
    "llama31_405b": _of("llama31_405b", "5.0.0", "6.0.0", _at_most(5.6), 3, "samples", "samples_count"),
    "llama31_8b": _of("llama31_8b", "5.1.0", "6.1.0", _at_most(3.3), 10, "samples", "samples_count"),
    "flux1": _of("flux1", "5.1.0", "6.1.0", _at_most(0.586), 10, "samples", "samples_count"),
    "gpt_oss_20b": _of("gpt_oss_20b", "6.0.0", "6.1.0", _at_most(3.34), 10, "samples", "samples_count"),
    "deepseekv3_671b": _of("deepseekv3_671b", "6.0.0", "6.1.0", _at_most(3.6), 3, "samples", "samples_count"),
    "dlrmv4": _of("dlrmv4", "6.1.0", "6.1.0", _at_least(0.75, bound=None), 10, "samples", "samples_count"),
    "qwen35_397b_grpo": _of(
        "qwen35_397b_grpo",
        "6.1.0",
        "6.1.0",
        QualityTarget(0.69, "at_least", target_allowed=False),
        3,
        "samples",
        "samples_count",
    ),
    "minigo": _of("minigo", "0.7.0", "2.1.0", _at_least(0.5), 10, "generation", "epoch_num", scored_offline=True),
    "gnmt": _of("gnmt", "0.7.0", "0.7.0", _at_least(0.24), 10, "epoch", "epoch_num"),
    "transformer": _of("transformer", "0.7.0", "0.7.0", _at_least(0.25), 10, "epoch", "epoch_num"),
    "cosmoflow": _of(
        "cosmoflow", "1.0.0", "3.0.0", _at_most(0.124), 10, "epoch", "epoch_num", usage="hpc", quality_key="eval_error"
    ),
    "deepcam": _of(
        "deepcam", "1.0.0", "3.0.0", _at_least(0.82, bound_allowed=True), 5, "epoch", "epoch_num", usage="hpc"
    ),
    "oc20": _of(
        "oc20", "1.0.0", "3.0.0", _at_most(0.036), 5, "epoch", "epoch_num", usage="hpc", quality_key="eval_error"
    ),
    "openfold": _of(
        "openfold", "3.0.0", "3.0.0", _at_least(0.8, bound_allowed=True), 10, "samples", "epoch_num", usage="hpc"
    ),
}
"""Every benchmark and its rounds. Source of ``runs``, ``dropped`` and ``non_converged``: rules, section on results."""


def _in_force(by_ruleset: Mapping[str, _T], ruleset: str) -> _T:
    """Return the entry of the newest ruleset that is not newer than ``ruleset``."""
    return by_ruleset[
        max((start for start in by_ruleset if version_key(start) <= version_key(ruleset)), key=version_key)
    ]


def _accepted_by(entry: _Benchmark) -> tuple[str, ...]:
    versions = RULESETS[entry.usage]
    return versions[versions.index(entry.first) : versions.index(entry.last) + 1]


def _names(name: str) -> dict[str, str]:
    """Return ruleset -> our benchmark name, for our name or a name in logs; oldest ruleset first."""
    if name in BENCHMARKS:
        return dict.fromkeys(_accepted_by(BENCHMARKS[name]), name)
    found = {
        version: benchmark
        for benchmark, entry in BENCHMARKS.items()
        for version in _accepted_by(entry)
        if _in_force(entry.log_names, version) == name
    }
    if not found:
        raise ConfigError(f"benchmark {name!r} is not known; known are {', '.join(sorted(BENCHMARKS))}")
    return dict(sorted(found.items(), key=lambda item: version_key(item[0])))


def newest_ruleset(benchmark: str) -> str:
    """Return the newest ruleset that accepts ``benchmark``, which is our name or the name in a log.

    Raises:
        ConfigError: if the name is not known.
    """
    return list(_names(benchmark))[-1]


def require_ruleset(ruleset: str | None) -> None:
    """Raise ConfigError if no benchmark has this version; None is allowed."""
    if ruleset is not None and not any(ruleset in versions for versions in RULESETS.values()):
        raise ConfigError(f"--ruleset {ruleset}: not known; known are {', '.join(RULESETS['training'])}")


def accepting_rulesets(log_name: str) -> list[str]:
    """Return the rulesets that accept logs whose ``submission_benchmark`` is ``log_name``, oldest first.

    Raises:
        ConfigError: if the name is not known.
    """
    return [version for version in _names(log_name) if accepted(log_name, version)]


def open_rulesets(log_name: str, time_ms: float) -> list[str]:
    """Return the rulesets under which the log of a run that started at ``time_ms`` may be valid, newest first.

    A run that started after the results of a round were published cannot belong to that round. The newest ruleset
    that accepts the benchmark is always included.

    Args:
        time_ms: milliseconds since 1970.

    Raises:
        ConfigError: the name is not known.
    """
    accepting = accepting_rulesets(log_name)
    published = PUBLISHED[rules_for(log_name).usage]
    later = [
        version for version in accepting[:-1] if version not in published or _start_ms(published[version]) > time_ms
    ]
    return [*accepting[-1:], *reversed(later)]


def _start_ms(day: str) -> float:
    return 1000 * datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()


def accepted(log_name: str, ruleset: str) -> bool:
    """Return whether the closed division of ``ruleset`` accepts logs with this ``submission_benchmark``."""
    return any(
        ruleset in _accepted_by(entry) and _in_force(entry.log_names, ruleset) == log_name
        for entry in BENCHMARKS.values()
    )


def rules_for(benchmark: str, ruleset: str | None = None) -> Rules:
    """Return the rules of a benchmark in a ruleset.

    Args:
        benchmark: our name, or the name in a log of that ruleset.
        ruleset: version; None for the newest that accepts the benchmark.

    Raises:
        ConfigError: if the name is not known or the ruleset does not accept it.
    """
    names = _names(benchmark)
    version = newest_ruleset(benchmark) if ruleset is None else ruleset
    if version not in names:
        known = any(version in versions for versions in RULESETS.values())
        raise ConfigError(
            f"ruleset {version} {f'does not accept {benchmark}' if known else 'is not known'}; {benchmark} is accepted "
            f"by {', '.join(names)} (last round {round_name(list(names)[-1])})"
        )
    name = names[version]
    entry = BENCHMARKS[name]
    large = None if entry.large_batch_targets is None else _in_force(entry.large_batch_targets, version)
    return Rules(
        benchmark=name,
        log_name=_in_force(entry.log_names, version),
        ruleset=version,
        usage=entry.usage,
        targets=_in_force(entry.targets, version),
        large_batch_targets=large,
        quality_key=entry.quality_key,
        progress_key=_in_force(entry.progress_key, version),
        unit=_in_force(entry.unit, version),
        runs=entry.runs,
        dropped=entry.dropped,
        non_converged=entry.non_converged,
        init_minutes=20.0 if version == "0.7.0" else entry.init_minutes,
        accepted_by=_accepted_by(entry),
        scored_offline=entry.scored_offline,
        quality_together=entry.quality_together,
    )
