"""Figures measured by ``bench``: as objects and text for the output, and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import resource
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
from common.ops.bench.stopwatch import peak_flops
from common.optional_packages import broken_packages
from common.run.kernel_profile import Breakdown
from common.run.provenance import provenance
from common.step.graphs import CaptureCost

KIB = 1024
LABEL = 36
"""Width of the name column in the output, in characters."""


@dataclass(frozen=True)
class Timing:
    """Timing of measured iterations.

    Attributes:
        step_ms: milliseconds per iteration; the median of the repetitions.
        samples: samples per iteration, over all ranks.
        joules: energy per iteration of this rank's GPU; None if unknown.
        sent_bytes: bytes per iteration that this rank's GPU sent over NVLink; None if unknown.
        host_cores: processors that this rank's process kept busy while it queued iterations, as a mean over the timed
            iterations. The wait for a GPU at their end is not included.
        overflow: whether the last iteration updated nothing because a gradient was not finite.
        repetitions: milliseconds per iteration in each repetition.
    """

    step_ms: float
    samples: int
    joules: float | None = None
    overflow: bool = False
    repetitions: tuple[float, ...] = ()
    sent_bytes: float | None = None
    host_cores: float | None = None

    @property
    def throughput(self) -> float:
        """Samples per second over all ranks."""
        return self.samples / self.step_ms * 1e3


@dataclass(frozen=True)
class RankFigures:
    """Figures of one iteration on one rank. None means unknown; on a CPU only ``step_ms`` is known.

    Attributes:
        compute_ms: milliseconds in which any kernel except communication ran.
        communication_ms: milliseconds in which communication kernels ran, including their wait for other ranks.
        exposed_ms: milliseconds in which only communication ran.
        power_w, sm_clock_mhz: means of the rank's GPU over the timed iterations.
        sent_bytes, host_cores: see :class:`Timing`.
        host_memory_bytes: largest host memory of the rank's process so far.
    """

    step_ms: float
    compute_ms: float | None = None
    communication_ms: float | None = None
    exposed_ms: float | None = None
    joules: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    sent_bytes: float | None = None
    host_cores: float | None = None
    host_memory_bytes: int | None = None

    @classmethod
    def of(cls, timing: Timing, means: Mapping[str, float], found: Breakdown | None) -> RankFigures:
        """Return the figures of this rank.

        Args:
            timing: timing with the energy of this rank's GPU. Mean power is computed from the energy where it is known,
                because a power reading is itself a mean over about a second.
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
            sent_bytes=timing.sent_bytes,
            host_cores=timing.host_cores,
            host_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
        )

    def text(self) -> str:
        """Return the known figures as text."""
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
    """Durations of the consecutive phases of a process.

    Args:
        began: start of the first phase, by ``time.perf_counter``.

    Attributes:
        seconds: phase name to seconds, in order; phases with the same name are added up.
    """

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last = began

    def end(self, name: str, now: float | None = None) -> float:
        """End a phase, at ``now`` or at the current time; return its seconds."""
        now = time.perf_counter() if now is None else now
        took, self._last = now - self._last, now
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        return took

    def text(self) -> str:
        """Return the phases as text."""
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())


@dataclass(frozen=True)
class BesideEvaluation:
    """Training while separate ranks evaluate one evaluation after the other.

    Attributes:
        step_ms: milliseconds per iteration.
        every: iterations between two transfers of the weights; about as many as an evaluation takes.
        sent_bytes: bytes of the weights.
    """

    step_ms: float
    every: int
    sent_bytes: int


@dataclass(frozen=True)
class RunTiming:
    """Timing of a run through reader and evaluations.

    Attributes:
        training: iterations fed by the reader.
        data_wait_ms: milliseconds per iteration that the host waited for data.
        first_evaluation, later_evaluation: seconds that training waits for the first and for a later evaluation; with
            evaluation ranks, seconds until the score, of which training waits for none.
        scoring: further seconds until the score, if it arrives later.
        with_evaluations: samples per second over all ranks, including evaluations at the rules' points.
        evaluation: where evaluations run.
        beside: training beside evaluations on evaluation ranks; None without such ranks.
    """

    training: Timing
    data_wait_ms: float
    eval_samples: int
    first_evaluation: float
    later_evaluation: float
    scoring: float
    with_evaluations: float
    evaluation: EvaluationConfig
    beside: BesideEvaluation | None = None


def table(rows: dict[str, str]) -> str:
    """Format names and values in two columns; further lines of a value are aligned below its first.

    The value follows directly after a name that is wider than its column.
    """
    below = "\n" + " " * LABEL
    return "\n".join(f"{name + ' ':<{LABEL}}{below.join(value.splitlines())}" for name, value in rows.items())


def header(run: RunConfig, device: torch.device, workload: Workload) -> str:
    """Return the lines before all figures: hardware, versions, sizes and implementations."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rows = {
        "benchmark": run.benchmark.description,
        "hardware": f"{run.world_size} x {name}",
        "versions": f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "micro-batch": f"{run.micro_batch} x {run.grad_accumulation_steps} accumulated, {run.precision}",
        **({"planned memory": plan} if (plan := workload.memory_plan()) else {}),
        **{f"implementation: {name}": choice for name, choice in workload.implementations().items()},
        **({"broken packages": "\n".join(broken)} if (broken := broken_packages()) else {}),
    }
    return table(rows)


def capture_rows(cost: CaptureCost) -> dict[str, str]:
    """Return the cost of the step's graphs as table rows; empty without graphs."""
    if not cost.graphs:
        return {}
    taken = f"captured in {cost.seconds:.1f} s, {cost.memory / 1e9:.2f} GB in their pools and inputs"
    return {"CUDA graphs of the step": f"{cost.graphs}, {taken}"}


def step_text(timing: Timing, run: RunConfig, workload: Workload, device: torch.device) -> str:
    """Format the figures of the step: time, rates, model FLOP/s and memory of this rank's GPU."""
    per_rank = timing.throughput / run.training_ranks
    rows = {
        "step": f"{step_times(timing)}, {_rate(timing.throughput)} samples/s ({_rate(per_rank)} a rank)",
        **size_rows("step", workload.sample_sizes(), timing.throughput),
    }
    if timing.overflow:
        rows["step: not valid"] = "the last gradients were not finite, so that nothing was updated"
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device))
        if flops := workload.sample_flops() * per_rank:  # 0 if unknown
            share = f", {flops / peak:.1%} MFU of {peak / 1e12:,.0f}" if peak else ""
            rows["model FLOP/s a rank"] = f"{flops / 1e12:.1f} TFLOP/s{share}"
        reserved, used = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
        rows["peak memory"] = (
            f"{reserved / 1e9:.1f} GB reserved for tensors, {used / 1e9:.1f} of it used; "
            f"{_device_memory(device) / 1e9:.1f} GB of the GPU taken in all"
        )
    return table(rows)


def size_rows(measured: str, sizes: Mapping[str, float], throughput: float) -> dict[str, str]:
    """Return a table row with the mean sizes of a sample and their rates per second; empty without sizes."""
    if not sizes:
        return {}
    each = (f"{mean:,.1f} {name} ({_rate(mean * throughput)}/s)" for name, mean in sizes.items())
    return {f"{measured}: a sample on average": ", ".join(each)}


def step_times(timing: Timing) -> str:
    """Return the median step time as text, with all repetitions if there are several."""
    every = ", ".join(f"{ms:.3f}" for ms in timing.repetitions)
    return f"{timing.step_ms:.3f} ms" + (f" (median of {every})" if len(timing.repetitions) > 1 else "")


def ranks_text(by_rank: Sequence[RankFigures]) -> str:
    """Return a line of text for each rank."""
    return "\n".join(f"{f'rank {rank}':<{LABEL}}{figures.text()}" for rank, figures in enumerate(by_rank))


def _rate(samples: float) -> str:
    """Format a rate as a whole number, or with four digits if it is below 1000."""
    return f"{samples:,.0f}" if samples >= 1000 else f"{samples:.4g}"


def _device_memory(device: torch.device) -> int:
    """Return the bytes of the GPU in use by all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def breakdown_text(title: str, found: Breakdown, total_ms: float) -> str:
    """Format the device time by kind of kernel; ``total_ms`` is the time under the profiler."""
    rows = found.rows(**{"no kernel (gaps)": total_ms - found.busy_ms})
    return "\n".join([f"{title:<{LABEL}}{total_ms:.3f} ms under the profiler", *rows])


def run_text(timing: RunTiming, step: Timing | None, sizes: Mapping[str, float]) -> str:
    """Format the run's figures, with their ratio to the step if it was measured.

    Args:
        sizes: mean sizes of a sample of the data.
    """
    run, evaluation = timing.training, timing.evaluation

    def share(throughput: float) -> str:
        return "" if step is None else f", {throughput / step.throughput:.3f} of the step"

    beside = timing.beside
    rows = {
        "run: training": f"{run.step_ms:.3f} ms, {_rate(run.throughput)} samples/s"
        f"{share(run.throughput)}; host waited {timing.data_wait_ms:.2f} ms for data",
        **size_rows("run", sizes, run.throughput),
        "run: evaluation": f"{timing.first_evaluation:.2f} s first, {timing.later_evaluation:.2f} s after, "
        f"of {timing.eval_samples:,} samples"
        + (f", on ranks of its own ({evaluation.ranks})" if evaluation.ranks else "")
        + (f"; scored in the background, {timing.scoring:.2f} s" if evaluation.scoring == "background" else "")
        + ("; scored offline, which training does not wait for" if evaluation.offline else ""),
        **(
            {}
            if beside is None
            else {
                "run: beside evaluations": f"{beside.step_ms:.3f} ms, {beside.step_ms / run.step_ms - 1:+.2%}; "
                f"{beside.sent_bytes / 1e6:,.1f} MB of weights sent every {beside.every} steps"
            }
        ),
        "run: with evaluations": f"{_rate(timing.with_evaluations)} samples/s{share(timing.with_evaluations)}",
    }
    return table(rows)


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
    """Return all measured values as a dict for the JSON report.

    Args:
        without_traffic: the step without sending gradients and weights; None if it was not measured.
        reserved: bytes that PyTorch reserved on rank 0's GPU for the step.

    Returns:
        ``samples_per_second`` and other rates over all ranks; ``sample_sizes``: means of the data, or of the step,
        if there was no run; bytes of rank 0's GPU; ``joules`` per step; ``updated``: whether the last step updated the
        weights, without which the rate is not valid.
    """
    cuda = device.type == "cuda"
    return {
        "benchmark": config.benchmark.name,
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "ranks": config.training_ranks,
        "micro_batch": config.micro_batch,
        "samples": config.global_batch,
        "precision": config.precision,
        "implementations": workload.implementations(),
        "sample_sizes": dict(workload.sample_sizes()),
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
            "beside_evaluation": None if run.beside is None else dataclasses.asdict(run.beside),
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
    """Write ``values`` with their :func:`~common.run.provenance.provenance` as JSON atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.written(path) as partial:
        partial.write_text(json.dumps({**values, "provenance": provenance()}, indent=1) + "\n")
