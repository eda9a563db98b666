"""Build the table of a node: speed of each workload on one, several and all GPUs, next to published runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from common.config.ranges import Positive
from common.measure.jobs import Job
from common.untrusted.strict_json import read_json_object

RATES = Path(__file__).with_name("published_rates.yaml")
COLUMNS = (
    "benchmark",
    "GPUs",
    "samples/s",
    "per GPU",
    "efficiency",
    "step, ms",
    "spread",
    "compute, ms",
    "communication, ms",
    "exposed, ms",
    "SM clock, MHz",
    "power, W",
    "memory, GB",
    "J/sample",
    "run, of step",
    "published, per GPU",
)
ATTRIBUTION = (
    "benchmark",
    "GPUs",
    "each alone, ms",
    "together, ms",
    "together without traffic, ms",
    "unequal GPUs, ms",
    "lock-step, ms",
    "traffic, ms",
    "waiting, ms",
)
MOST_VALUES = 4
"""Largest number of ranks for which a cell lists every value; for more, it has the smallest and the largest."""


@dataclass(frozen=True)
class MeasuredCopy:
    """Result of one copy of a measurement.

    Attributes:
        figures: content of ``bench.report``; None if the measurement failed.
        failure: reason of a failure, with the last line of output; else empty.
        places: indices of the GPUs in the node, from 0.
    """

    job: Job
    figures: Mapping[str, Any] | None
    failure: str = ""
    places: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name of the measurement; with several copies, it includes the GPU."""
        return f"{self.job.name} (GPU {self.places[0]})" if self.job.copies > 1 and self.places else self.job.name


def write_results(path: Path, command: str, outcomes: Sequence[MeasuredCopy]) -> None:
    """Write results as JSON, one line for each; :func:`read_results` reads them."""
    lines = ",\n".join(json.dumps(asdict(outcome)) for outcome in outcomes)
    path.write_text(f'{{"command": {json.dumps(command)}, "results": [\n{lines}\n]}}\n')


def read_results(path: Path) -> list[MeasuredCopy]:
    """Return the results in a file of :func:`write_results`.

    Raises:
        DataError: the file cannot be read, or is no JSON object.
        KeyError, TypeError: it has other content.
    """
    return [
        MeasuredCopy(Job(**each["job"]), each["figures"], each["failure"], tuple(each["places"]))
        for each in read_json_object(path)["results"]
    ]


def positive(figures: Mapping[str, Any], name: str) -> float:
    """Return a rate, time or size from a file.

    Raises:
        KeyError, ValueError: it is missing, or is not a positive and finite number.
    """
    value = figures[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not Positive.holds(value):
        raise ValueError(f"{name} is {value!r}, not a positive and finite number")
    return float(value)


def gpu_count(figures: Mapping[str, Any], name: str) -> int:
    """Return a number of GPUs from a file.

    Raises:
        KeyError, ValueError: it is missing, or is not an integer of at least 1.
    """
    value = figures[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}, not a number of GPUs")
    return value


def published_rates(scale: str = "") -> dict[str, str]:
    """Return the rate per GPU of a published run for each benchmark, as text.

    Args:
        scale: recipe such as ``8xH100``; runs on the same accelerator are preferred over the first known run.
    """
    rates: dict[str, str] = {}
    for entry in sorted(
        yaml.safe_load(RATES.read_text())["rates"], key=lambda entry: not scale.endswith(f"x{entry['accelerator']}")
    ):
        run = f"{number(entry['per_gpu'])} ({entry['round']}, {entry['chips']} x {entry['accelerator']})"
        rates.setdefault(entry["benchmark"], run)
    return rates


def table(outcomes: Sequence[MeasuredCopy]) -> str:
    """Return the Markdown table, a second one that attributes the loss of several GPUs, and a list of failures."""
    published = {outcome.job.scale: published_rates(outcome.job.scale) for outcome in outcomes}
    measured = sorted(
        (outcome for outcome in outcomes if outcome.figures is not None),
        key=lambda outcome: (outcome.job.benchmark, outcome.job.gpus, outcome.places),
    )
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    lost = []
    for outcome in measured:
        alone = _alone(outcome, measured)
        lines.append(_line(_cells(outcome, alone, published[outcome.job.scale].get(outcome.job.benchmark, ""))))
        if attributed := _attribution(outcome, alone):
            lost.append(_line(attributed))
    if lost:
        lines += ["", _line(ATTRIBUTION), _line(["---"] * len(ATTRIBUTION)), *lost]
    said = [f"{each.name}: failed: {each.failure}" for each in outcomes if each.figures is None]
    said += [
        f"{each.name}: not valid: the last gradients were not finite, so that nothing was updated"
        for each in measured
        if each.figures is not None and not each.figures["updated"]
    ]
    return "\n".join([*lines, *(["", *said] if said else [])])


def _alone(outcome: MeasuredCopy, measured: Sequence[MeasuredCopy]) -> list[Mapping[str, Any]]:
    """Return the one-GPU figures of every GPU of ``outcome``; empty if any of them is missing."""
    found = {
        one.places: one.figures
        for one in measured
        if one.figures is not None and one.job.benchmark == outcome.job.benchmark and one.job.gpus == 1
    }
    own = [found.get((place,)) for place in outcome.places]
    return [figures for figures in own if figures is not None] if None not in own else []


def _attribution(outcome: MeasuredCopy, ones: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row that splits the additional step time of several GPUs over the fastest single GPU into its causes.

    The row is empty if figures are missing, or if a single GPU had another number of samples than its share.
    """
    figures = outcome.figures
    assert figures is not None
    share = figures["samples"] / outcome.job.gpus
    if figures["without_traffic"] is None or not ones or any(one["samples"] != share for one in ones):
        return []
    together, coupled = figures["step_ms"], figures["without_traffic"]["step_ms"]
    alone = [one["step_ms"] for one in ones]
    communication = [rank["communication_ms"] for rank in figures["by_rank"]]
    known = [ms for ms in communication if ms is not None]
    return [
        outcome.job.benchmark,
        str(outcome.job.gpus),
        _values(alone, "{:.2f}"),
        f"{together:.2f}",
        f"{coupled:.2f}",
        f"{max(alone) - min(alone):.2f}",
        f"{coupled - max(alone):.2f}",
        f"{together - coupled:.2f}",
        f"{max(known) - min(known):.2f}" if known else "",
    ]


def _values(values: Sequence[float | None], form: str) -> str:
    """Format the known values of all ranks, or the range of many; empty if none is known."""
    known = [value for value in values if value is not None]
    if len(known) > MOST_VALUES:
        return f"{form.format(min(known))} to {form.format(max(known))}"
    return ", ".join(form.format(value) for value in known)


def _cells(outcome: MeasuredCopy, alone: Sequence[Mapping[str, Any]], published: str) -> list[str]:
    figures = outcome.figures
    assert figures is not None
    gpus, rate = outcome.job.gpus, figures["samples_per_second"]
    joules, memory, run, repetitions = (figures[key] for key in ("joules", "reserved_bytes", "run", "repetitions_ms"))

    def of_ranks(name: str, form: str) -> str:
        return _values([rank[name] for rank in figures["by_rank"]], form)

    return [
        outcome.job.benchmark,
        str(gpus) if outcome.job.copies == 1 else f"1 (GPU {outcome.places[0]})",
        number(rate),
        number(rate / gpus),
        f"{rate / gpus / min(one['samples_per_second'] for one in alone):.3f}" if alone and gpus > 1 else "",
        f"{figures['step_ms']:.2f}",
        f"{(max(repetitions) - min(repetitions)) / figures['step_ms']:.1%}" if len(repetitions) > 1 else "",
        of_ranks("compute_ms", "{:.2f}"),
        of_ranks("communication_ms", "{:.2f}") if gpus > 1 else "",
        of_ranks("exposed_ms", "{:.2f}") if gpus > 1 else "",
        of_ranks("sm_clock_mhz", "{:.0f}"),
        of_ranks("power_w", "{:.0f}"),
        "" if memory is None else f"{memory / 1e9:.1f}",
        "" if joules is None else f"{joules / figures['samples']:.3g}",
        "" if run is None else _shares(run, rate),
        published,
    ]


def _shares(run: Mapping[str, float], rate: float) -> str:
    """Return the rate of a whole run as a fraction of the step's rate, without and with evaluations."""
    return f"{run['samples_per_second'] / rate:.3f}; evaluated {run['with_evaluations'] / rate:.3f}"


def number(value: float) -> str:
    """Format a number: without decimals from 1000, else with four significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
