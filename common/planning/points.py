"""Measured steps as points of the model: time, energy and memory by layout and batch of a GPU."""

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
from common.errors import ConfigError
from common.measure.table import MeasuredCopy, read_results
from common.planning.compute import decoder_of

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
        input_factor: time of the step through the reader of the data, divided by ``seconds``; None if not measured.
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
    input_factor: float | None = None
    evaluation: float | None = None

    @property
    def gpus(self) -> int:
        """GPUs that trained."""
        return self.run.training_ranks

    @property
    def axes(self) -> tuple[int, int, int]:
        """Sizes of pp, cp and tp."""
        return tuple(self.run.layout[axis] for axis in ("pp", "cp", "tp"))  # type: ignore[return-value]


def read_points(files: Iterable[Path], benchmark: str, gpu: str, load: Load) -> list[MeasuredPoint]:
    """Return the valid points of a benchmark on a kind of GPU; measurements of the same step are one point.

    Steps of a network with fewer layers are left out, except those of decoders, whose layers are alike.

    Args:
        files: results of ``mlperf-suite measure``; other JSON files are ignored.
        gpu: name of the GPU.

    Raises:
        ConfigError: a file cannot be read.
    """
    found: dict[tuple[object, ...], list[tuple[RunConfig, MeasuredCopy, Path]]] = {}
    for path in files:
        for copy in _copies(path):
            figures = copy.figures
            if copy.job.benchmark != benchmark or figures is None or figures.get("device") != gpu:
                continue
            if not figures.get("updated") or "step_ms" not in figures:
                continue
            run = _configuration(figures, path, load)
            own = run.workload
            if decoder_of(run) is None and leaves_out_layers(vars(own.model), vars(own.facts)):
                continue
            key = (run.training_ranks, *run.layout.items(), figures["micro_batch"], figures["samples"], kind_of(run))
            found.setdefault(key, []).append((run, copy, path))
    return [_point(copies) for copies in found.values()]


def kind_of(run: RunConfig) -> tuple[object, ...]:
    """Return what must be equal for steps to be comparable: precision, and implementation of matrix products."""
    model = getattr(run.workload, "model", None)
    implementations = getattr(model, "implementations", None)
    linear = getattr(model, "linear", None)
    if linear is None:
        linear = implementations.get("linear") if isinstance(implementations, dict) else None
    return run.precision, linear


def _copies(path: Path) -> Sequence[MeasuredCopy]:
    try:
        return read_results(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        return ()


def _configuration(figures: Mapping[str, Any], path: Path, load: Load) -> RunConfig:
    """Return the configuration that a measured ``bench`` command had."""
    words = shlex.split(figures["provenance"]["command"])
    overrides = [word for word in words[2:] if not word.startswith(("bench.", "output_dir=", "data_dir="))]
    batch = f"hparams.global_batch_size={figures['samples']}"
    try:
        tree = compose([*overrides, f"micro_batch={figures['micro_batch']}", batch])
        return load(tree)[0]
    except ConfigError as error:
        raise ConfigError(f"{path}: its command {' '.join(overrides)} does not compose any more: {error}") from error


def _point(copies: Sequence[tuple[RunConfig, MeasuredCopy, Path]]) -> MeasuredPoint:
    run, _, path = copies[0]
    figures = [copy.figures for _, copy, _ in copies if copy.figures is not None]
    steps = [each["step_ms"] / 1e3 for each in figures]
    seconds = statistics.median(steps)
    powers = [each["joules"] / (each["step_ms"] / 1e3) / run.training_ranks for each in figures if each.get("joules")]
    memories = [each["reserved_bytes"] for each in figures if each.get("reserved_bytes")]
    runs = [(each, each["run"]) for each in figures if each.get("run")]
    inputs = [each["samples_per_second"] / whole["samples_per_second"] for each, whole in runs]
    evaluations = [
        whole["evaluation_seconds"] * run.layout["dp"] / whole["eval_samples"]
        for _, whole in runs
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
        input_factor=statistics.median(inputs) if inputs else None,
        evaluation=statistics.median(evaluations) if evaluations else None,
    )
