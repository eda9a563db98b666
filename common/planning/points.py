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
from common.measure.table import positive
from common.planning.compute import decoder_of
from common.planning.input_model import NOTHING_MEASURED, MeasuredReader
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
        source: file of the measurement.
    """

    run: RunConfig
    accumulation: int
    seconds: float
    source: Path
    spread: float | None = None
    watts: float | None = None
    memory: float | None = None

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
    """Measured points and reader of a benchmark on a kind of GPU.

    Attributes:
        evaluation: seconds of one replica per evaluated sample; None if not measured.
    """

    points: list[MeasuredPoint]
    reader: MeasuredReader
    evaluation: float | None = None


@dataclass(frozen=True)
class _Report:
    """Figures of one ``bench`` command, with its configuration; None: not measured.

    Attributes:
        seconds: time of a step that updated the weights.
        throughput: samples per second of such a step, of all replicas.
        through: samples per second of a run through the reader, of all replicas.
        evaluation: seconds of one replica per evaluated sample.
        reader: rate and processor time of the reader alone.
    """

    run: RunConfig
    path: Path
    seconds: float | None = None
    throughput: float | None = None
    watts: float | None = None
    memory: float | None = None
    through: float | None = None
    evaluation: float | None = None
    reader: MeasuredReader | None = None

    @property
    def step(self) -> tuple[object, ...]:
        """Key of a step: ranks, layout, batches, precision, matrix products, layers."""
        run, decoder = self.run, decoder_of(self.run)
        layers = None if decoder is None else decoder.layers
        return run.training_ranks, *run.layout.items(), run.micro_batch, run.global_batch, kind_of(run), layers


def read_measurements(files: Iterable[Path], benchmark: str, gpu: str, load: Load) -> Measurements:
    """Return the valid measurements of a benchmark on a kind of GPU; measurements of the same step are one point.

    Steps of a network with fewer layers are left out, except those of decoders, whose layers are alike. Evaluations
    with fewer layers are left out for all networks.

    Args:
        gpu: name of the GPU.

    Raises:
        ConfigError: a file cannot be read, or is neither results of ``measure`` nor a report of ``bench``; or a reader
            was measured with pauses between the steps, in which it works ahead.
    """
    reports: list[_Report] = []
    runs: dict[str, RunConfig] = {}
    for path in files:
        try:
            for figures in _figures(path):
                if figures["benchmark"] == benchmark and figures["device"] == gpu:
                    reports.append(_report(_configuration(figures, path, load, runs), figures, path))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(path, f"{type(error).__name__} {error}") from error
    steps: dict[tuple[object, ...], list[_Report]] = {}
    for each in reports:
        if each.seconds is not None and not _lacks_layers(each.run):
            steps.setdefault(each.step, []).append(each)
    evaluations = [each.evaluation for each in reports if not _leaves_out_layers(each.run)]
    return Measurements([_point(alike) for alike in steps.values()], _reader(reports), _median(evaluations))


def kind_of(run: RunConfig) -> tuple[object, ...]:
    """Return what must be equal for steps to be comparable: precision, and implementation of matrix products."""
    model = getattr(run.workload, "model", None)
    implementations = getattr(model, "implementations", None)
    linear = getattr(model, "linear", None)
    if linear is None:
        linear = implementations.get("linear") if isinstance(implementations, dict) else None
    return run.precision, linear


def _leaves_out_layers(run: RunConfig) -> bool:
    own = run.workload
    return leaves_out_layers(vars(own.model), vars(own.facts))


def _lacks_layers(run: RunConfig) -> bool:
    """Return whether layers are left out whose time is unknown; layers of decoders are alike."""
    return decoder_of(run) is None and _leaves_out_layers(run)


def _figures(path: Path) -> list[Mapping[str, Any]]:
    """Return the figures of all successful ``bench`` commands in a file.

    The result has none of steps beside other software or without traffic.
    """
    try:
        content = read_json_object(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except DataError as error:
        raise ConfigError(str(error)) from error
    if "results" in content:
        found = [each["figures"] for each in content["results"]]
    elif {"benchmark", "device", "provenance"} <= content.keys():
        found = [content]
    else:
        raise _unreadable(path, "it has no benchmark, device or provenance")
    successful = [figures for figures in found if figures is not None]
    return [figures for figures in successful if "peers" not in figures and figures.get("traffic", True)]


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


def _report(run: RunConfig, figures: Mapping[str, Any], path: Path) -> _Report:
    """Return the figures of a report.

    Raises:
        ConfigError: a reader was measured with pauses.
        KeyError, TypeError, ValueError: a figure is missing or wrong.
    """
    updated = bool(figures.get("updated"))
    seconds = positive(figures, "step_ms") / 1e3 if updated and "step_ms" in figures else None
    throughput = positive(figures, "samples_per_second") if updated else None
    joules = positive(figures, "joules") if figures.get("joules") else None
    whole, alone = figures.get("run") or {}, figures.get("reader")
    evaluation = None
    if whole.get("evaluation_seconds") and whole.get("eval_samples"):
        evaluation = positive(whole, "evaluation_seconds") * run.layout["dp"] / positive(whole, "eval_samples")
    reader = None
    if alone is not None:
        if alone["pause_ms"]:
            raise ConfigError(f"{path}: measured with bench.pause_ms: measure the reader without pauses")
        rate = positive(alone, "samples_per_second") / run.layout["dp"]
        reader = MeasuredReader(rate, float(alone["processor_seconds"]))  # 0 is possible: clock ticks are coarse
    return _Report(
        run=run,
        path=path,
        seconds=seconds,
        throughput=throughput,
        watts=joules / seconds / run.training_ranks if joules and seconds else None,
        memory=positive(figures, "reserved_bytes") if figures.get("reserved_bytes") else None,
        through=positive(whole, "samples_per_second") if whole else None,
        evaluation=evaluation,
        reader=reader,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _point(reports: Sequence[_Report]) -> MeasuredPoint:
    run = reports[0].run
    steps = [each.seconds for each in reports if each.seconds is not None]
    seconds = statistics.median(steps)
    return MeasuredPoint(
        run=run,
        accumulation=run.grad_accumulation_steps,
        seconds=seconds,
        source=reports[0].path,
        spread=statistics.stdev(steps) / seconds if len(steps) > 1 else None,
        watts=_median(each.watts for each in reports),
        memory=max((each.memory for each in reports if each.memory is not None), default=None),
    )


def _reader(reports: Sequence[_Report]) -> MeasuredReader:
    """Return the fastest reader alone, and the median slowdown of steps through the reader.

    A run is compared with the step of its own report, or with other reports of the same step; steps that did not update
    the weights do not count. If a run is faster than the reader alone, its rate counts: the reader delivered it.
    """
    alone = [each.reader for each in reports if each.reader is not None]
    fastest = max(alone, key=lambda reader: reader.rate or 0.0, default=NOTHING_MEASURED)
    rate = fastest.rate
    steps: dict[tuple[object, ...], list[float]] = {}
    for each in reports:
        if each.seconds is not None and each.throughput is not None:
            steps.setdefault(each.step, []).append(each.throughput)
    slowdowns = []
    for each in reports:
        if each.through is None:
            continue
        base = each.throughput or _median(steps.get(each.step, ()))
        if base is not None and not _lacks_layers(each.run):
            slowdowns.append(base / each.through)
        if rate is not None:
            rate = max(rate, each.through / each.run.layout["dp"])
    return MeasuredReader(rate, fastest.processor_seconds, _median(slowdowns))
