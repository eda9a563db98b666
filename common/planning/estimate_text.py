"""Tables and JSON of ``mlperf-suite estimate``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from common.config.system import Hardware
from common.planning.compute import not_modelled
from common.planning.estimates import RunEstimate
from common.planning.run_model import best_measurement
from common.planning.search import Plan

WORTH = 0.5
"""Marginal speed-up per added GPU below which more GPUs do not pay."""

COLUMNS = (
    *("GPUs", "batch", "micro-batch", "layout", "step, ms", "steps"),
    *("minutes", "90 % interval", "efficiency", "GPU-hours", "kWh"),
)
PART_NAMES = {
    "compute": "computation",
    "update": "update",
    "node_slowdown": "lock-step in the node",
    "overlap_slowdown": "slower beside communication",
    "exposed": "gradients and weights",
    "model_communication": "communication of the model",
    "bubble": "pipeline bubble",
    "input": "waiting for input",
    "straggler": "slowest GPU",
}


LIMITS = ("reader", "processor cores", "storage")
"""Names of the limits of the samples per second of a replica (:func:`common.planning.input_model.reader_limits`)."""


def best_plans(rows: Mapping[int, Sequence[Plan]]) -> dict[int, Plan]:
    """Return the plan of each number of GPUs with the smallest upper limit of its time; GPUs ascend."""
    return {gpus: min(plans, key=lambda plan: plan.estimate.interval()[1]) for gpus, plans in sorted(rows.items())}


def count_of(count: int) -> str:
    """Return a number of GPUs as text."""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def worthwhile(best: Mapping[int, Plan]) -> tuple[int, bool]:
    """Return the largest number of GPUs that pays (:data:`WORTH`), and whether a larger one was tried."""
    counts = sorted(best)
    for before, after in itertools.pairwise(counts):
        gain = best[before].estimate.seconds / best[after].estimate.seconds - 1
        if gain < WORTH * (after / before - 1):
            return before, True
    return counts[-1], False


def verdict_of(best: Mapping[int, Plan]) -> str:
    """Return a sentence with the number of GPUs up to which more of them pay; empty for one number of GPUs."""
    if len(best) < 2:
        return ""
    most, tried = worthwhile(best)
    if tried:
        return f"More than {count_of(most)} do not pay: an added GPU does less than half of the work of those before."
    return f"Up to {count_of(most)}, an added GPU does at least half of the work of those before."


def written(rows: Mapping[int, Sequence[Plan]], system: str | None) -> str:
    """Return all tables as text.

    Args:
        rows: best plan of each batch, by number of GPUs.
        system: name of the system for `train`; None to leave it out.
    """
    best = best_plans(rows)
    table: list[tuple[str, ...]] = [COLUMNS]
    for plans in (rows[gpus] for gpus in best):
        for plan in plans:
            mark = " *" if plan is best[plan.estimate.layout.gpus] else ""
            cells = cells_of(plan.estimate)
            table.append((cells[0] + mark, *cells[1:]))
    lines = _aligned(table)
    lines += ["", "* best of this number of GPUs: the smallest upper limit of the time"]
    lines += [verdict] if (verdict := verdict_of(best)) else []
    missing = not_modelled(next(iter(best.values())).estimate.benchmark)
    lines += [f"not modelled: {missing}"] if missing else []
    lines += ["", *_step_table(best), "", *input_sentences(best), *input_commands(best), "", *_energy_lines(best)]
    for gpus, plan in best.items():
        lines += ["", f"{count_of(gpus)}: mlperf-suite train {' '.join(plan.settings.overrides(system))}"]
        if plan.settings.other_batch:
            lines.append(f"  The hyperparameters of {plan.settings.start.scale} are for another batch: tune them.")
        if plan.estimate.convergence.found == "interpolated":
            lines.append("  There is no RCP at this batch: the samples are interpolated.")
        sources = sorted(plan.estimate.uncertainty.items(), key=lambda item: -item[1])
        lines.append("  Uncertainty: " + ", ".join(f"{name} {each:.1%}" for name, each in sources))
        if measurement := best_measurement(plan.estimate, plan.settings.start.scale):
            lines.append(f"  This would reduce it most ({measurement[0]}): {measurement[1]}")
    return "\n".join(lines)


def input_commands(best: Mapping[int, Plan]) -> list[str]:
    """Return the commands that measure the input, as lines of text; empty if something is known about it."""
    plan = next(iter(best.values()))
    if plan.estimate.step.input is not None:
        return []
    benchmark, scale, layout = plan.estimate.benchmark, plan.settings.start.scale, plan.estimate.layout
    ranks = layout.pp * layout.cp * layout.tp
    return [
        "Measure it with prepared data, and name both results with --measured:",
        f"  mlperf-suite measure {benchmark} --scale {scale} --gpus {ranks} --data DATA",
        f"  mlperf-suite bench benchmark={benchmark} scale={scale} scale.nodes=1 scale.gpus_per_node={ranks} "
        f"data_dir=DATA/{benchmark} bench.only=reader bench.report=reader.json",
    ]


def input_sentences(best: Mapping[int, Plan]) -> list[str]:
    """Return what is known about the input: the samples per second that a replica needs, and those it can receive."""
    if all(plan.estimate.step.input is None for plan in best.values()):
        return ["Input: not known, so the estimates have no time for it."]
    sentences = []
    for gpus, plan in best.items():
        estimate = plan.estimate
        needed = estimate.layout.global_batch / estimate.layout.replicas / estimate.step.total
        limits = {name: f"{rate:,.0f}" for name, rate in estimate.reader_limits.items()}
        known = ", ".join(f"{name} {limits.get(name, 'not known')}" for name in LIMITS)
        sentences.append(f"Input on {count_of(gpus)}: a replica reads {needed:,.0f} samples/s; limits: {known}.")
    return sentences


def document(
    rows: Mapping[int, Sequence[Plan]], system: str, hardware: Hardware, train_system: str | None
) -> dict[str, Any]:
    """Return the content of the JSON file: every estimate with its parts, and the best of each number of GPUs."""
    best = best_plans(rows)
    most, tried = worthwhile(best)
    return {
        "system": system,
        "hardware": dataclasses.asdict(hardware),
        "more_gpus_pay_up_to": most if tried else None,
        "not_modelled": not_modelled(next(iter(best.values())).estimate.benchmark),
        "estimates": [
            {
                **dataclasses.asdict(plan.estimate),
                "interval": plan.estimate.interval(),
                "step_seconds": plan.estimate.step.total,
                "gpu_hours": plan.estimate.gpu_hours,
                "best": plan is best[plan.estimate.layout.gpus],
                "overrides": plan.settings.overrides(train_system),
            }
            for gpus in best
            for plan in rows[gpus]
        ],
    }


def cells_of(estimate: RunEstimate) -> tuple[str, ...]:
    """Return the cells of :data:`COLUMNS`."""
    layout = estimate.layout
    sizes = [f"{axis}={getattr(layout, axis)}" for axis in ("pp", "cp", "tp") if getattr(layout, axis) > 1]
    sizes += [f"{layout.evaluation_ranks} evaluate"] if layout.evaluation_ranks else []
    low, high = (seconds / 60 for seconds in estimate.interval())
    return (
        str(layout.gpus),
        str(layout.global_batch),
        f"{layout.micro_batch} x {layout.accumulation}",
        ", ".join(sizes) or "data parallel",
        f"{estimate.step.total * 1e3:,.2f}",
        f"{estimate.steps:,.0f}",
        _minutes(estimate.seconds / 60),
        f"{_minutes(low)} to {_minutes(high)}",
        f"{estimate.efficiency:.3f}",
        f"{estimate.gpu_hours:,.2f}",
        f"{sum(estimate.joules.values()) / 3.6e6:,.2f}" if estimate.joules else "",
    )


def _step_table(best: Mapping[int, Plan]) -> list[str]:
    """Return the parts of the step of each number of GPUs, in milliseconds, without parts that are 0 everywhere."""
    table = [("ms of a step", *(count_of(gpus) for gpus in best))]
    for part, name in PART_NAMES.items():
        values = [plan.estimate.step.parts().get(part) for plan in best.values()]
        if any(values) or None in values:
            cells = ("not known" if each is None else f"{each * 1e3:,.2f}" for each in values)
            table.append((name, *cells))
    table.append(("all", *(f"{plan.estimate.step.total * 1e3:,.2f}" for plan in best.values())))
    return _aligned(table)


def _energy_lines(best: Mapping[int, Plan]) -> list[str]:
    """Return the energy of each number of GPUs by part, in kWh."""
    names = list(dict.fromkeys(name for plan in best.values() for name in plan.estimate.joules))
    table = [("kWh of a run", *(count_of(gpus) for gpus in best))]
    for name in names:
        table.append((name, *(f"{plan.estimate.joules.get(name, 0.0) / 3.6e6:,.3f}" for plan in best.values())))
    return _aligned(table) if names else []


def _minutes(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
