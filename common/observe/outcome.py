"""What a run has come to: plain values, known once it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """A training run that has ended by itself.

    Attributes:
        status: ``"success"`` or ``"aborted"``.
        ruleset: version of the rules that it ran under.
        seed: of the run.
        resumed: it continued from a checkpoint.
        seconds: from run_start to run_stop.
        samples: training samples done in that time, over all ranks.
        steps: optimizer steps, those before a resumed run's checkpoint too.
        overflows: of the run's own steps, those that changed nothing since their gradients were not finite.
        losses: (training samples, loss) of each step.
        history: (training samples, metric to value) of each evaluation.
        evaluations: how many there were in this run.
        evaluation_seconds: that they took together.
        hidden_seconds: of these, that training went on behind.
        energy_joules: that this rank's GPU took, initialisation included; None where it is not known.
        log: the run's log.
        output_dir: folder of the run.
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
        """Training samples per second over the run."""
        return self.samples / self.seconds
