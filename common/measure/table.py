"""The table of a node: what each workload does on one GPU, on several and on all, beside published runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.measure.jobs import Job

RATES = Path(__file__).with_name("published_rates.yaml")
COLUMNS = (
    "benchmark",
    "GPUs",
    "samples/s",
    "per GPU",
    "of one GPU",
    "step, ms",
    "exposed, ms",
    "memory, GB",
    "J/sample",
    "run, of step",
    "published, per GPU",
)


@dataclass(frozen=True)
class Outcome:
    """What became of a measurement.

    Attributes:
        job: the measurement.
        figures: as ``bench.report`` has them; None where it failed.
        failure: the last line of what it said, where it failed.
    """

    job: Job
    figures: Mapping[str, Any] | None
    failure: str = ""


def published_rates(scale: str = "") -> dict[str, str]:
    """Benchmark to the rate of one GPU in a published run, in words.

    Args:
        scale: such as ``8xH100``: runs on its accelerator, where they are known, else the first that is known.
    """
    rates: dict[str, str] = {}
    for entry in sorted(
        yaml.safe_load(RATES.read_text())["rates"], key=lambda entry: not scale.endswith(f"x{entry['accelerator']}")
    ):
        run = f"{number(entry['per_gpu'])} ({entry['round']}, {entry['chips']} x {entry['accelerator']})"
        rates.setdefault(entry["benchmark"], run)
    return rates


def table(outcomes: Sequence[Outcome]) -> str:
    """A table in Markdown, and behind it what failed or does not count."""
    published = {outcome.job.scale: published_rates(outcome.job.scale) for outcome in outcomes}
    ones = {
        outcome.job.benchmark: outcome.figures["samples_per_second"]
        for outcome in outcomes
        if outcome.job.gpus == 1 and outcome.figures is not None
    }
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.job.benchmark, outcome.job.gpus)):
        benchmark = outcome.job.benchmark
        if outcome.figures is not None:
            rate = published[outcome.job.scale].get(benchmark, "")
            lines.append(_line(_cells(outcome, ones.get(benchmark), rate)))
    said = [f"{each.job.name}: failed: {each.failure}" for each in outcomes if each.figures is None]
    said += [
        f"{each.job.name}: not valid: the last gradients were not finite, so that nothing was updated"
        for each in outcomes
        if each.figures is not None and not each.figures["updated"]
    ]
    return "\n".join([*lines, *(["", *said] if said else [])])


def _cells(outcome: Outcome, one: float | None, published: str) -> list[str]:
    figures = outcome.figures
    assert figures is not None
    gpus, rate = outcome.job.gpus, figures["samples_per_second"]
    exposed, joules, memory, run = (
        figures[key] for key in ("exposed_communication_ms", "joules", "reserved_bytes", "run")
    )
    return [
        outcome.job.benchmark,
        str(gpus),
        number(rate),
        number(rate / gpus),
        "" if one is None else f"{rate / gpus / one:.3f}",
        f"{figures['step_ms']:.2f}",
        "" if exposed is None else f"{exposed:.2f}",
        "" if memory is None else f"{memory / 1e9:.1f}",
        "" if joules is None else f"{joules / figures['samples']:.3g}",
        "" if run is None else _shares(run, rate),
        published,
    ]


def _shares(run: Mapping[str, float], rate: float) -> str:
    """What a run keeps of its step's rate, without and with evaluations."""
    return f"{run['samples_per_second'] / rate:.3f}; evaluated {run['with_evaluations'] / rate:.3f}"


def number(value: float) -> str:
    """Whole, or four digits of a small one."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
