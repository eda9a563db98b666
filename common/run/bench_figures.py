"""What ``bench`` measured: for whoever prints it, and as JSON for a program."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.config.schema import EvaluationConfig, RunConfig
from common.contract.workload import Workload
from common.data import atomic


@dataclass(frozen=True)
class Timing:
    """Measured iterations.

    Attributes:
        step_ms: milliseconds of one.
        samples: of one, over all ranks.
        joules: that the GPU of this rank took in one; None where it is not known.
        overflow: the last one updated nothing, since a gradient was not finite.
    """

    step_ms: float
    samples: int
    joules: float | None = None
    overflow: bool = False

    @property
    def throughput(self) -> float:
        """Samples a second over all ranks."""
        return self.samples / self.step_ms * 1e3


@dataclass(frozen=True)
class RunTiming:
    """A run through reader and evaluations.

    Attributes:
        training: iterations fed by the reader.
        data_wait_ms: that the host waited for data in one.
        eval_samples: of an evaluation.
        first_evaluation, later_evaluation: seconds that training stood still for the first and for another.
        scoring: seconds until the score, where it comes later.
        with_evaluations: samples a second over all ranks, evaluations at the rules' points included.
        evaluation: who evaluates.
    """

    training: Timing
    data_wait_ms: float
    eval_samples: int
    first_evaluation: float
    later_evaluation: float
    scoring: float
    with_evaluations: float
    evaluation: EvaluationConfig


def figures(
    step: Timing,
    run: RunTiming | None,
    exposed_ms: float | None,
    config: RunConfig,
    workload: Workload,
    device: torch.device,
) -> dict[str, Any]:
    """What was measured, for a program to read.

    Args:
        step: the step alone.
        run: through reader and evaluations, where that was measured.
        exposed_ms: communication beside which nothing ran, in one step; None without a profile.
        config, workload, device: what was measured.

    Returns:
        ``samples_per_second`` and all else over all ranks; bytes of rank 0's GPU; ``joules`` of one step; whether the
        last step ``updated`` the weights, as all must for a rate that counts.
    """
    cuda = device.type == "cuda"
    return {
        "benchmark": config.benchmark.name,
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()},
        "ranks": config.training_ranks,
        "micro_batch": config.micro_batch,
        "precision": config.precision,
        "implementations": workload.implementations(),
        "step_ms": step.step_ms,
        "samples": step.samples,
        "samples_per_second": step.throughput,
        "joules": step.joules,
        "updated": not step.overflow,
        "exposed_communication_ms": exposed_ms,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
        "run": None
        if run is None
        else {
            "samples_per_second": run.training.throughput,
            "with_evaluations": run.with_evaluations,
            "evaluation_seconds": run.later_evaluation,
            "eval_samples": run.eval_samples,
        },
    }


def write_figures(path: Path, values: dict[str, Any]) -> None:
    """Write ``values`` as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.written(path) as partial:
        partial.write_text(json.dumps(values, indent=1) + "\n")
