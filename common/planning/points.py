"""Measurements for the model: steps as points by layout and batch of a GPU, and the rate of the reader.

The files are results of ``mlperf-suite measure`` or reports of ``mlperf-suite bench`` (``bench.report=FILE``): of a
step, of a run through the reader (``bench.only=run``), or of the reader alone (``bench.only=reader``).
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.composition import compose
from common.config.schema import RunConfig, SessionConfig
from common.config.sections import leaves_out_layers
from common.config.yaml_files import CONFIGS
from common.errors import ConfigError, DataError
from common.planning.compute import decoder_of
from common.planning.input_model import MeasuredReader
from common.untrusted.strict_json import read_json_object

RESULTS = CONFIGS.parent / "docs" / "results"
"""Folder of the suite's own measurements."""
Load = Callable[[Mapping[str, Any]], tuple[RunConfig, SessionConfig]]
"""Builds the configuration of a run (:func:`common.cli.load`)."""


@dataclass(frozen=True)
class MeasuredPoint:
    """A measured step of one layout and batch: medians over GPUs and repetitions.

    Attributes:
        run: configuration of the measured step.
        accumulation: micro-batches per replica in the measured step.
        seconds: time of the step.
        spread: standard deviation of the step time over copies on different GPUs, as a fraction; None for one copy.
        watts: power of a GPU; None if unknown.
        memory: bytes that PyTorch reserved on a GPU; None if unknown.
        evaluation: seconds of one replica per evaluated sample; None if not measured.
        source: file of the measurement.
    """

    run: RunConfig
    accumulation: int
    seconds: float
    source: Path
    spread: float | None = None
    watts: float | None = None
    memory: float | None = None
    evaluation: float | None = None

    @property
    def gpus(self) -> int:
        """GPUs that trained."""
        return self.run.training_ranks

    @property
    def axes(self) -> tuple[int, int, int]:
        """Sizes of pp, cp and tp."""
        return tuple(self.run.layout[axis] for axis in ("pp", "cp", "tp"))  # type: ignore[return-value]


@dataclass(frozen=True)
class Measurements:
    """What is measured of a benchmark on a kind of GPU."""

    points: list[MeasuredPoint]
    reader: MeasuredReader


@dataclass(frozen=True)
class _Report:
    """Figures of one ``bench`` command, with its configuration."""

    run: RunConfig
    figures: Mapping[str, Any]
    path: Path

    @property
    def step(self) -> tuple[object, ...]:
        """What is the same in all reports of one step."""
        run = self.run
        return run.training_ranks, *run.layout.items(), run.micro_batch, run.global_batch, kind_of(run)


def read_measurements(files: Iterable[Path], benchmark: str, gpu: str, load: Load) -> Measurements:
    """Return the valid measurements of a benchmark on a kind of GPU; measurements of the same step are one point.

    Steps of a network with fewer layers are left out, except those of decoders, whose layers are alike.

    Args:
        gpu: name of the GPU.

    Raises:
        ConfigError: a file cannot be read, or is neither results of ``measure`` nor a report of ``bench``.
    """
    reports: list[_Report] = []
    runs: dict[str, RunConfig] = {}
    for path in files:
        try:
            for figures in _figures(path):
                if figures["benchmark"] == benchmark and figures["device"] == gpu:
                    reports.append(_Report(_configuration(figures, path, load, runs), figures, path))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(path, f"{type(error).__name__} {error}") from error
    steps: dict[tuple[object, ...], list[_Report]] = {}
    for each in reports:
        if each.figures.get("updated") and "step_ms" in each.figures and not _lacks_layers(each.run):
            steps.setdefault(each.step, []).append(each)
    try:
        return Measurements([_point(alike) for alike in steps.values()], _reader(reports))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise _unreadable(reports[0].path, f"{type(error).__name__} {error}") from error


def kind_of(run: RunConfig) -> tuple[object, ...]:
    """Return what must be equal for steps to be comparable: precision, and implementation of matrix products."""
    model = getattr(run.workload, "model", None)
    implementations = getattr(model, "implementations", None)
    linear = getattr(model, "linear", None)
    if linear is None:
        linear = implementations.get("linear") if isinstance(implementations, dict) else None
    return run.precision, linear


def _lacks_layers(run: RunConfig) -> bool:
    own = run.workload
    return decoder_of(run) is None and leaves_out_layers(vars(own.model), vars(own.facts))


def _figures(path: Path) -> list[Mapping[str, Any]]:
    """Return the figures of all successful ``bench`` commands in a file; none of steps beside other software."""
    try:
        content = read_json_object(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except DataError as error:
        raise ConfigError(str(error)) from error
    if "results" in content:
        found = [each["figures"] for each in content["results"]]
        return [figures for figures in found if figures is not None]
    if not {"benchmark", "device", "provenance"} <= content.keys():
        raise _unreadable(path, "it has no benchmark, device or provenance")
    return [] if "peers" in content else [content]


def _unreadable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path}: neither results of `mlperf-suite measure` nor a report of `mlperf-suite bench` (bench.report=FILE): "
        f"{reason}"
    )


def _configuration(figures: Mapping[str, Any], path: Path, load: Load, runs: dict[str, RunConfig]) -> RunConfig:
    """Return the configuration that a measured ``bench`` command had; ``runs`` has those that are known already."""
    words = shlex.split(figures["provenance"]["command"])
    overrides = [word for word in words[2:] if not word.startswith(("bench.", "output_dir=", "data_dir="))]
    overrides += [f"micro_batch={figures['micro_batch']}", f"hparams.global_batch_size={figures['samples']}"]
    command = shlex.join(overrides)
    try:
        if command not in runs:
            runs[command] = load(compose(overrides))[0]
        return runs[command]
    except ConfigError as error:
        raise ConfigError(f"{path}: its command {command} does not compose any more: {error}") from error


def _point(reports: Sequence[_Report]) -> MeasuredPoint:
    run, path = reports[0].run, reports[0].path
    figures = [each.figures for each in reports]
    steps = [each["step_ms"] / 1e3 for each in figures]
    seconds = statistics.median(steps)
    powers = [each["joules"] / (each["step_ms"] / 1e3) / run.training_ranks for each in figures if each.get("joules")]
    memories = [each["reserved_bytes"] for each in figures if each.get("reserved_bytes")]
    evaluations = [
        whole["evaluation_seconds"] * run.layout["dp"] / whole["eval_samples"]
        for whole in (each["run"] for each in figures if each.get("run"))
        if whole.get("evaluation_seconds") and whole.get("eval_samples")
    ]
    return MeasuredPoint(
        run=run,
        accumulation=run.grad_accumulation_steps,
        seconds=seconds,
        source=path,
        spread=statistics.stdev(steps) / seconds if len(steps) > 1 else None,
        watts=statistics.median(powers) if powers else None,
        memory=max(memories) if memories else None,
        evaluation=statistics.median(evaluations) if evaluations else None,
    )


def _reader(reports: Sequence[_Report]) -> MeasuredReader:
    """Return the fastest reader alone, and the median slowdown of steps through the reader.

    A run is compared with the step of its own report, or with other reports of the same step. If a run is faster than
    the reader alone, its rate counts: the reader delivered it.

    Raises:
        ConfigError: a reader was measured with pauses between the steps, in which it works ahead.
    """
    alone = []
    for each in reports:
        reader = each.figures.get("reader")
        if reader is None:
            continue
        if reader["pause_ms"]:
            raise ConfigError(f"{each.path}: measured with bench.pause_ms: measure the reader without pauses")
        alone.append((reader["samples_per_second"] / each.run.layout["dp"], reader["processor_seconds"]))
    rate, processor_seconds = max(alone, key=lambda found: found[0], default=(None, None))
    steps: dict[tuple[object, ...], list[float]] = {}
    for each in reports:
        if each.figures.get("updated") and "step_ms" in each.figures:
            steps.setdefault(each.step, []).append(each.figures["samples_per_second"])
    slowdowns = []
    for each in (each for each in reports if each.figures.get("run")):
        through = each.figures["run"]["samples_per_second"]
        own = each.figures.get("samples_per_second")
        if own is not None or each.step in steps:
            slowdowns.append((own or statistics.median(steps[each.step])) / through)
        if rate is not None:
            rate = max(rate, through / each.run.layout["dp"])
    return MeasuredReader(rate, processor_seconds, statistics.median(slowdowns) if slowdowns else None)
