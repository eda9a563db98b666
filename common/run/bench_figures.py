"""What ``bench`` measured: for whoever prints it, and as JSON for a program."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.config.schema import EvaluationConfig, RunConfig
from common.contract.workload import Workload
from common.data import atomic
from common.run.kernels import Breakdown


@dataclass(frozen=True)
class Timing:
    """Measured iterations.

    Attributes:
        step_ms: milliseconds of one; the median of the repetitions.
        samples: of one, over all ranks.
        joules: that the GPU of this rank took in one; None where it is not known.
        overflow: the last one updated nothing, since a gradient was not finite.
        repetitions: milliseconds of one in each repetition.
    """

    step_ms: float
    samples: int
    joules: float | None = None
    overflow: bool = False
    repetitions: tuple[float, ...] = ()

    @property
    def throughput(self) -> float:
        """Samples a second over all ranks."""
        return self.samples / self.step_ms * 1e3


@dataclass(frozen=True)
class RankFigures:
    """One iteration on one rank; None where something is not known, as all but the step is on a CPU.

    Attributes:
        step_ms: milliseconds.
        compute_ms: in which anything but communication ran.
        communication_ms: in which communication ran: it begins when its kernel does, which then waits for other ranks.
        exposed_ms: of communication that nothing else ran beside.
        joules, power_w, sm_clock_mhz: of the rank's GPU, the latter two means over the timed iterations.
    """

    step_ms: float
    compute_ms: float | None = None
    communication_ms: float | None = None
    exposed_ms: float | None = None
    joules: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None

    @classmethod
    def of(cls, timing: Timing, means: Mapping[str, float], found: Breakdown | None) -> RankFigures:
        """The figures of this rank.

        Args:
            timing: with the energy of this rank's GPU, which counts exactly where a reading of the power is a mean of
                about a second.
            means: of the readings of the GPU.
            found: what the profiler saw.
        """
        joules = timing.joules
        mean_ms = statistics.fmean(timing.repetitions)
        return cls(
            timing.step_ms,
            compute_ms=None if found is None else found.compute_ms,
            communication_ms=None if found is None else found.communication_ms,
            exposed_ms=None if found is None else found.exposed_ms,
            joules=joules,
            power_w=means.get("power_w") if joules is None else joules / mean_ms * 1e3,
            sm_clock_mhz=means.get("sm_clock_mhz"),
        )

    def text(self) -> str:
        """In words, as far as they are known."""
        named = {
            "step {:.3f} ms": self.step_ms,
            "compute {:.3f} ms": self.compute_ms,
            "communication {:.3f} ms": self.communication_ms,
            "beside nothing {:.3f} ms": self.exposed_ms,
            "{:.0f} W": self.power_w,
            "SM clock {:.0f} MHz": self.sm_clock_mhz,
        }
        return ", ".join(words.format(value) for words, value in named.items() if value is not None)


class Phases:
    """Where the time of a process goes.

    Args:
        began: when the first phase began, by ``time.perf_counter``.

    Attributes:
        seconds: of each phase, in order; those of one name are added up.
    """

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last = began

    def end(self, name: str, now: float | None = None) -> float:
        """End a phase, ``now`` or at another moment; returns its seconds."""
        now = time.perf_counter() if now is None else now
        took, self._last = now - self._last, now
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        return took

    def text(self) -> str:
        """In words."""
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())


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
    step: Timing | None,
    by_rank: Sequence[RankFigures],
    run: RunTiming | None,
    without_traffic: tuple[Timing, Sequence[RankFigures]] | None,
    reserved: int | None,
    phases: Phases,
    config: RunConfig,
    workload: Workload,
    device: torch.device,
) -> dict[str, Any]:
    """What was measured, for a program to read.

    Args:
        step: the step alone, where that was measured.
        by_rank: the same on every rank.
        run: through reader and evaluations, where that was measured.
        without_traffic: the step in which ranks send no gradients and no weights, where that was measured.
        reserved: bytes of rank 0's GPU that the step took.
        phases: of rank 0's process.
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
        **({} if step is None else _whole_step_figures(step, by_rank)),
        "without_traffic": None if without_traffic is None else _step_figures(*without_traffic),
        "reserved_bytes": reserved,
        "seconds": phases.seconds,
        "run": None
        if run is None
        else {
            "samples_per_second": run.training.throughput,
            "with_evaluations": run.with_evaluations,
            "evaluation_seconds": run.later_evaluation,
            "eval_samples": run.eval_samples,
        },
    }


def _whole_step_figures(step: Timing, by_rank: Sequence[RankFigures]) -> dict[str, Any]:
    return {
        **_step_figures(step, by_rank),
        "samples": step.samples,
        "samples_per_second": step.throughput,
        "updated": not step.overflow,
    }


def _step_figures(step: Timing, by_rank: Sequence[RankFigures]) -> dict[str, Any]:
    return {
        "step_ms": step.step_ms,
        "repetitions_ms": step.repetitions,
        "joules": step.joules,
        "by_rank": [dataclasses.asdict(rank) for rank in by_rank],
    }


def write_figures(path: Path, values: dict[str, Any]) -> None:
    """Write ``values`` as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.written(path) as partial:
        partial.write_text(json.dumps(values, indent=1) + "\n")
