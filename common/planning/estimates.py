"""Data that the parts of `estimate` exchange: convergence, the parts of a step, and the estimate of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal


@dataclass(frozen=True)
class Convergence:
    """Samples that a training needs to reach its target.

    Attributes:
        global_batch: samples per step.
        samples: mean number of samples until the target is reached, a multiple of the evaluation interval on average.
        spread: standard deviation of the samples of one run, as a fraction of the mean.
        found: ``exact`` for a batch with a reference convergence point (RCP), ``interpolated`` between two RCPs.
        interpolation: standard deviation of the interpolated mean, as a fraction; 0 for ``exact``.
    """

    global_batch: int
    samples: float
    spread: float
    found: Literal["exact", "interpolated"]
    interpolation: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one optimizer step by cause. The sum of the known ones is the step.

    Attributes:
        compute: forward and backward passes of all micro-batches on the median GPU.
        update: the optimizer's update.
        node_slowdown: longer computation because all GPUs of the node work.
        overlap_slowdown: longer computation because communication runs beside it.
        exposed: communication of gradients and weights while no computation runs.
        model_communication: collectives of tp and cp, and exchanges of embeddings, which computation waits for.
        bubble: idle time of pipeline stages.
        input: waiting for the reader; None if not known.
        straggler: waiting for the slowest GPU.
    """

    compute: float
    update: float = 0.0
    node_slowdown: float = 0.0
    overlap_slowdown: float = 0.0
    exposed: float = 0.0
    model_communication: float = 0.0
    bubble: float = 0.0
    input: float | None = None
    straggler: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return math.fsum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the seconds of the known parts by name."""
        parts = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: seconds for name, seconds in parts.items() if seconds is not None}


@dataclass(frozen=True)
class RunLayout:
    """How a run divides its GPUs and batch.

    Attributes:
        gpus: all GPUs of the run.
        evaluation_ranks: GPUs that only evaluate.
        micro_batch: samples of a replica that are computed together.
        accumulation: micro-batches per replica and step.
    """

    gpus: int
    global_batch: int
    micro_batch: int
    accumulation: int
    pp: int = 1
    cp: int = 1
    tp: int = 1
    evaluation_ranks: int = 0

    @property
    def training_gpus(self) -> int:
        """GPUs that train."""
        return self.gpus - self.evaluation_ranks

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        return self.training_gpus // (self.pp * self.cp * self.tp)


@dataclass(frozen=True)
class RunEstimate:
    """Estimate of a run from `run_start` to `run_stop`.

    Attributes:
        convergence: samples until the target.
        step: parts of the mean step, seconds.
        steps, evaluations: numbers of steps and evaluations until the target.
        evaluation: seconds that training waits for one evaluation, mean of all.
        last_evaluation: seconds between the last step and the score that reaches the target.
        seconds: time to train.
        uncertainty: standard deviation of ``seconds`` by source, as a fraction of ``seconds``; independent.
        efficiency: samples per second and GPU, as a fraction of those of one GPU that only computes its steps.
        joules: energy by part: ``training`` and the idle parts by name.
        memory: bytes of a GPU; None if unknown.
        reader_limits: samples per second that a replica receives at most, by limit; without unknown ones.
    """

    benchmark: str
    layout: RunLayout
    convergence: Convergence
    step: StepTimes
    steps: float
    evaluations: float
    evaluation: float
    last_evaluation: float
    seconds: float
    efficiency: float
    uncertainty: Mapping[str, float] = field(default_factory=dict)
    joules: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    reader_limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the run, evaluation GPUs included."""
        return self.layout.gpus * self.seconds / 3600

    @property
    def spread(self) -> float:
        """Standard deviation of ``seconds``, as a fraction."""
        return math.sqrt(math.fsum(each**2 for each in self.uncertainty.values()))

    def interval(self, deviations: float = 1.645) -> tuple[float, float]:
        """Return lower and upper limit of ``seconds``, by default those of 90 %.

        The logarithm of the time is taken as normal, so the lower limit stays positive.
        """
        factor = math.exp(deviations * self.spread)
        return self.seconds / factor, self.seconds * factor
