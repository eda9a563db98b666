"""Time, energy and uncertainty of a whole run, from `run_start` to `run_stop`.

``time = steps x step + evaluations x waiting for one + the last score``. Start-up is outside of the clock. Sources of
uncertainty are independent, and each acts on its own part of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from common.config.schema import RunConfig
from common.config.system import Hardware
from common.mlperf.schedules import Schedule
from common.planning.compute import ComputeCurve, forward_share, sizes_of
from common.planning.constants import (
    EVALUATION_DEVIATION,
    EVALUATION_SECONDS,
    INPUT_DEVIATION,
    MEASURED_EVALUATION_DEVIATION,
    MODEL_DEVIATION,
    NETWORK_DEVIATION,
    NODE_DEVIATION,
    READER_DEVIATION,
)
from common.planning.estimates import Convergence, RunEstimate, RunLayout, StepTimes
from common.planning.input_model import NOTHING_MEASURED, MeasuredReader, reader_limits

MEASUREMENTS: Mapping[str, tuple[str, float]] = {
    "computation": (
        "mlperf-suite measure {benchmark} --scale {scale} --gpus {ranks} "
        "--override micro_batch={micro_batch} --override hparams.global_batch_size={micro_batch}{axes}",
        0.0,
    ),
    "evaluation": (
        "mlperf-suite measure {benchmark} --scale {scale} --gpus 1 --data DATA",
        MEASURED_EVALUATION_DEVIATION / EVALUATION_DEVIATION,
    ),
    "input": ("mlperf-suite measure {benchmark} --scale {scale} --gpus 1 --data DATA", 0.0),
}
"""Source of uncertainty -> the measurement that reduces it, and the fraction that remains."""


@dataclass(frozen=True)
class EvaluationCost:
    """Time of one evaluation.

    Attributes:
        sample: seconds per sample on one replica.
        measured: whether ``sample`` was measured; otherwise it is the training step's forward pass.
        offline: whether checkpoints are scored outside of the measured time.
    """

    sample: float
    measured: bool
    offline: bool

    @property
    def deviation(self) -> float:
        """Standard deviation of the time, as a fraction."""
        return MEASURED_EVALUATION_DEVIATION if self.measured else EVALUATION_DEVIATION

    def seconds(self, samples: int, replicas: int) -> float:
        """Return the seconds in which ``replicas`` evaluate ``samples``."""
        return 0.0 if self.offline else EVALUATION_SECONDS + math.ceil(samples / replicas) * self.sample


def evaluation_cost(
    run: RunConfig, curve: ComputeCurve, batch: int, measured: float | None, offline: bool
) -> EvaluationCost:
    """Return the cost of an evaluation; without a measurement, the forward pass of micro-batches of ``batch``."""
    sample = sizes_of(run).windows * forward_share(run) * curve.at(batch) / batch if measured is None else measured
    return EvaluationCost(sample, measured is not None, offline)


def evaluations_until(schedule: Schedule, samples: float, train_samples: int, global_batch: int) -> float:
    """Return the number of evaluations until ``samples``, at least 1; between two points, in proportion."""
    count = 0.0
    for block in schedule.blocks(train_samples, global_batch):
        if block.start_sample + block.samples > samples:
            count += max(0.0, (samples - block.start_sample) / block.samples)
            break
        count += 1
    return max(1.0, count)


def estimate_run(
    run: RunConfig,
    layout: RunLayout,
    convergence: Convergence,
    step: StepTimes,
    deviation: float,
    schedule: Schedule,
    cost: EvaluationCost,
    hardware: Hardware,
    alone: float,
    watts: float | None = None,
    memory: float | None = None,
    reader: MeasuredReader = NOTHING_MEASURED,
) -> RunEstimate:
    """Return the estimate of a run.

    Args:
        deviation: standard deviation of the computation, as a fraction.
        alone: samples per second of one GPU.
        watts: measured power of a GPU that trains; None for that of ``hardware``.
        memory: bytes of a GPU.
        reader: measurements of the reader, with which ``step`` was estimated.
    """
    steps = convergence.samples / layout.global_batch
    evaluations = evaluations_until(schedule, convergence.samples, run.train_samples, layout.global_batch)
    rows = getattr(run.workload.facts, "eval_rows", run.benchmark.eval_samples)  # GPT-3's samples are tokens
    evaluating = (layout.evaluation_ranks or layout.training_gpus) // (layout.pp * layout.cp * layout.tp)
    evaluated = cost.seconds(rows, max(1, evaluating))
    training = steps * step.total
    if layout.evaluation_ranks:
        # Training waits only if the next evaluation point comes before the ranks have finished; after the last one,
        # it has ended. `waits` is the mean of all evaluations.
        waits = max(0.0, evaluated - training / evaluations) * (evaluations - 1) / evaluations
        last = evaluated
    else:
        waits, last = evaluated, 0.0
    seconds = training + evaluations * waits + last
    sources = {
        "convergence": convergence.spread * (training + evaluations * waits),
        "interpolation of RCPs": convergence.interpolation * (training + evaluations * waits),
        "computation": deviation * steps * (step.compute + step.node_slowdown + step.bubble),
        "network": _network(step, layout, hardware) * steps,
        "several GPUs": NODE_DEVIATION * training if layout.training_gpus > 1 else 0.0,
        "model": MODEL_DEVIATION * seconds if layout.gpus > hardware.gpus_per_node else 0.0,
        "measured evaluation" if cost.measured else "evaluation": cost.deviation * (evaluations * waits + last),
        "input": 0.0 if reader.slowdown is not None else INPUT_DEVIATION * training,
        "waiting for input": READER_DEVIATION * steps * (step.input or 0.0),
    }
    return RunEstimate(
        benchmark=run.benchmark.name,
        layout=layout,
        convergence=convergence,
        step=step,
        steps=steps,
        evaluations=evaluations,
        evaluation=waits,
        last_evaluation=last,
        seconds=seconds,
        efficiency=convergence.samples / seconds / layout.gpus / alone,
        uncertainty={name: each / seconds for name, each in sources.items() if each},
        joules=_joules(layout, step, steps, evaluations, evaluated, waits, seconds, hardware, watts),
        memory=memory,
        reader_limits=reader_limits(run.benchmark.name, layout, reader, hardware),
    )


def best_measurement(estimate: RunEstimate, scale: str) -> tuple[str, str] | None:
    """Return the measurement that reduces the uncertainty most, after the name of its source; None without any."""
    reduced = {
        name: each * math.sqrt(1 - MEASUREMENTS[name][1] ** 2)
        for name, each in estimate.uncertainty.items()
        if name in MEASUREMENTS
    }
    if not reduced:
        return None
    largest, layout = max(reduced, key=lambda name: reduced[name]), estimate.layout
    sizes = {axis: getattr(layout, axis) for axis in ("pp", "cp", "tp")}
    return largest, MEASUREMENTS[largest][0].format(
        benchmark=estimate.benchmark,
        scale=scale,
        micro_batch=layout.micro_batch,
        ranks=math.prod(sizes.values()),
        axes="".join(f" --override layout.{axis}={size}" for axis, size in sizes.items() if size > 1),
    )


def _network(step: StepTimes, layout: RunLayout, hardware: Hardware) -> float:
    """Return the standard deviation of the communication of a step, in seconds."""
    if layout.gpus <= hardware.gpus_per_node:
        return 0.0  # inside a node it is part of NODE_DEVIATION
    return NETWORK_DEVIATION * (step.exposed + step.model_communication + step.overlap_slowdown)


def _joules(
    layout: RunLayout,
    step: StepTimes,
    steps: float,
    evaluations: float,
    evaluated: float,
    waits: float,
    seconds: float,
    hardware: Hardware,
    watts: float | None,
) -> dict[str, float]:
    """Return the energy by part. Waiting GPUs take ``idle_gpu_watts``; empty if the power of a GPU is unknown."""
    busy_watts = watts or hardware.gpu_watts
    if busy_watts is None:
        return {}
    idle, training = hardware.idle_gpu_watts, layout.training_gpus
    busy = step.compute + step.update + step.node_slowdown + step.overlap_slowdown
    energy = {"training": training * steps * busy * busy_watts}
    waiting = {
        "waiting for communication": step.exposed + step.model_communication,
        "pipeline bubble": step.bubble,
        "waiting for input": step.input or 0.0,
        "waiting for the slowest GPU": step.straggler,
    }
    energy |= {f"idle: {name}": training * steps * each * idle for name, each in waiting.items()}
    evaluating = layout.evaluation_ranks or training
    used = min(evaluations * evaluated, seconds) if layout.evaluation_ranks else evaluations * waits
    energy["evaluation"] = evaluating * used * busy_watts
    if layout.evaluation_ranks:
        energy["idle: evaluation ranks"] = layout.evaluation_ranks * (seconds - used) * idle
        energy["idle: training ranks at evaluations"] = training * (seconds - steps * step.total) * idle
    # Other jobs use the rest of a node that the run does not fill.
    energy["nodes without GPUs"] = layout.gpus / hardware.gpus_per_node * hardware.node_watts * seconds
    return {name: each for name, each in energy.items() if each}
