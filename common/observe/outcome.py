"""The outcome of a training run, as plain values that are known after its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """The values of a training run that ended regularly, whether it reached the target or not.

    Attributes:
        status: ``"success"``, ``"aborted"``, or ``"unscored"`` while checkpoints wait for ``mlperf-suite score``.
        ruleset: version of the MLPerf rules.
        resumed: whether the run continued from a checkpoint.
        seconds: time from run_start to run_stop.
        samples: training samples in that time, over all ranks.
        steps: optimizer steps, including those before the checkpoint of a resumed run.
        overflows: steps since the start or resumption that updated nothing because a gradient was not finite.
        losses: (training samples, loss) of each step.
        history: (training samples, metric to value) of each evaluation.
        evaluations: number of evaluations since the start or resumption.
        evaluation_seconds: total duration of these evaluations.
        hidden_seconds: part of ``evaluation_seconds`` that overlapped with training.
        energy_joules: energy of the GPU of this rank, including initialisation; None if unknown.
        log: path of the MLPerf log.
    """

    status: str
    ruleset: str
    seed: int
    resumed: bool
    seconds: float
    samples: int
    steps: int
    overflows: int
    losses: Sequence[tuple[int, float]]
    history: Sequence[tuple[int, Mapping[str, float]]]
    evaluations: int
    evaluation_seconds: float
    hidden_seconds: float
    energy_joules: float | None
    log: Path
    output_dir: Path

    @property
    def throughput(self) -> float:
        """Training samples per second, over ``seconds``."""
        return self.samples / self.seconds
