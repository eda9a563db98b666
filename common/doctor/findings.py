"""Judge the readings of all GPUs and nodes: find broken limits, outliers and differences."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from common.doctor.limits import Limit, Limits
from common.doctor.reading import Measure, Reading, Readings, Scope, measure_of

Kind = Literal["limit", "outlier", "difference", "state", "failed", "no answer", "not made"]

FEW = 3
"""Smallest number of units for which an outlier is unfit; with fewer, it is unclear which unit is wrong."""
NAMED = 8
"""Largest number of names that a message lists."""
LOCKED_GB = 1.0
"""Smallest limit of locked memory, in GB, that the buffers of InfiniBand fit in."""
OPEN_FILES = 65536
"""Number of files that the readers and connections of a rank in a large job may open."""


@dataclass(frozen=True)
class MeasuredUnit:
    """A GPU, a node, or the job, with its readings.

    Attributes:
        model: GPU model, else empty. Outliers are determined among units of the same model.
    """

    scope: Scope
    where: str
    readings: Readings
    model: str = ""


@dataclass(frozen=True)
class Finding:
    """A problem or remark about a machine.

    Attributes:
        kind: ``not made`` is a check that could not run.
        where: name of the GPU, node or rank; may be empty if the finding concerns several or none.
        figure: name of the reading; empty if the finding concerns none.
        text: message, with the names of the units.
        unfit: whether the finding makes the machine unfit.
    """

    kind: Kind
    where: str
    figure: str
    text: str
    unfit: bool


def find(units: Sequence[MeasuredUnit], limits: Limits) -> list[Finding]:
    """Return all findings about the units; those that make a machine unfit come first."""
    found = [finding for unit in units for finding in _of_unit(unit, limits)]
    for scope, name, measured in _by_figure(units):
        measure = measure_of(scope, name)
        if measure.equal:
            found += _differences(name, measure, measured)
        if measure.better is not None:
            limit = limits.get(f"{scope}.{name.partition('@')[0]}", Limit())
            spread = measure.spread if limit.spread is None else limit.spread
            for model in sorted({unit.model for unit in measured}):
                found += _outliers(name, measure, [unit for unit in measured if unit.model == model], spread)
    found += [*_not_made(units), *_untested(units, limits)]
    return sorted(found, key=lambda finding: not finding.unfit)


def _untested(units: Sequence[MeasuredUnit], limits: Limits) -> list[Finding]:
    """Return a finding that lists limits without any reading, because an untested limit must not seem met."""
    here = {unit.scope for unit in units}
    taken = {f"{unit.scope}.{name.partition('@')[0]}" for unit in units for name in unit.readings}
    names = [name for name in limits if name.partition(".")[0] in here and name not in taken]
    text = f"limits that were not tested, since these checks did not run: {', '.join(names)}"
    return [Finding("not made", "", "", text, False)] if names else []


def _of_unit(unit: MeasuredUnit, limits: Limits) -> Iterable[Finding]:
    for name, reading in unit.readings.items():
        measure = measure_of(unit.scope, name)
        if reading.failed:
            yield Finding("failed", unit.where, name, f"{unit.where}: {measure.title}: {reading.failed}", True)
        elif isinstance(reading.value, int | float):
            limit = limits.get(f"{unit.scope}.{name.partition('@')[0]}")
            broken = limit and _broken(measure, reading.value, limit)
            if broken:
                yield Finding("limit", unit.where, name, f"{unit.where}: {broken}", True)
    for name, text, unfit in STATES[unit.scope](unit.readings):
        yield Finding("state", unit.where, name, f"{unit.where}: {text}", unfit)


def _broken(measure: Measure, value: float, limit: Limit) -> str:
    size = abs(value) if measure.magnitude else float(value)
    bounds = ((limit.min, size < (limit.min or 0), "below"), (limit.max, size > (limit.max or 0), "above"))
    for bound, is_broken, side in bounds:
        if bound is None or not (is_broken or math.isnan(size)):
            continue
        if isinstance(value, bool):
            return f"{measure.title}: {measure.show(value)}"
        if measure.magnitude:  # only clock offsets use this
            text = f"clock is {_seconds(size)} {'ahead of' if value > 0 else 'behind'} rank 0"
            return f"{text}, {side} the limit of {_seconds(bound)}"
        return f"{measure.title} {measure.show(value)}, {side} the limit of {measure.show(bound)}"
    return ""


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.1f} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def _by_figure(units: Sequence[MeasuredUnit]) -> Iterable[tuple[Scope, str, list[MeasuredUnit]]]:
    """Return each reading that at least two units have a value of, as scope, name and those units."""
    found: dict[tuple[Scope, str], list[MeasuredUnit]] = defaultdict(list)
    for unit in units:
        for name, reading in unit.readings.items():
            if reading.value is not None:
                found[unit.scope, name].append(unit)
    return [(scope, name, measured) for (scope, name), measured in found.items() if len(measured) > 1]


def _outliers(name: str, measure: Measure, units: Sequence[MeasuredUnit], spread: float) -> Iterable[Finding]:
    if len(units) < 2:
        return
    values = {unit.where: _number(unit.readings[name]) for unit in units}
    higher = measure.better == "higher"
    best = max if higher else min
    few = len(units) < FEW
    typical = best(values.values()) if few else statistics.median(values.values())
    for where, value in values.items():
        worse = 100 * (typical - value if higher else value - typical) / typical if typical > 0 else 0.0
        if worse > spread:
            side = "below" if higher else "above"
            than = "the other" if few else f"the median of {len(units)} {_plural(units[0].scope)}"
            text = f"{where}: {measure.title} {measure.show(value)}, {worse:.0f} % {side} {than}"
            yield Finding("outlier", where, name, text, not few)


def _differences(name: str, measure: Measure, units: Sequence[MeasuredUnit]) -> Iterable[Finding]:
    values = {unit.where: measure.show(_value(unit.readings[name])) for unit in units}
    counts = Counter(values.values())
    (usual, count), *others = counts.most_common()
    if not others:
        return
    if others[0][1] == count:
        groups = "; ".join(f"{value} on {join_names([w for w, v in values.items() if v == value])}" for value in counts)
        yield Finding("difference", "", name, f"{measure.title} differs: {groups}", True)
        return
    for where, value in values.items():
        if value != usual:
            rest = f"{count} of {len(units)} {_plural(units[0].scope)} have {usual}"
            yield Finding("difference", where, name, f"{where}: {measure.title} is {value}; {rest}", True)


def _not_made(units: Sequence[MeasuredUnit]) -> Iterable[Finding]:
    """Return the checks that could not run, grouped by reason."""
    found: dict[tuple[Scope, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for unit in units:
        for name, reading in unit.readings.items():
            if reading.missing:
                found[unit.scope, reading.missing][unit.where].append(name)
    for (scope, why), by_unit in found.items():
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for where, names in by_unit.items():
            alike[tuple(names)].append(where)
        for figures, units_without in alike.items():
            titles, where = ", ".join(measure_of(scope, name).title for name in figures), join_names(units_without)
            yield Finding("not made", where, ", ".join(figures), f"{where}: {titles}: {why}", False)


def join_names(names: Sequence[str]) -> str:
    """Return the first ``NAMED`` names as text, with the number of the others."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _plural(scope: Scope) -> str:
    return {"gpu": "GPUs", "node": "nodes", "job": "jobs"}[scope]


def _value(reading: Reading) -> float | int | str | bool:
    assert reading.value is not None
    return reading.value


def _number(reading: Reading) -> float:
    return float(_value(reading))


State = tuple[str, str, bool]
"""Name of the reading, message, and whether the machine is unfit."""


def _gpu_states(readings: Readings) -> Iterable[State]:
    width, width_max = (readings.get(name, Reading()).value for name in ("pcie_width", "pcie_width_max"))
    if isinstance(width, int) and isinstance(width_max, int) and width < width_max:
        yield (
            "pcie_width",
            f"the PCIe link has {width} of {width_max} lanes: reseat the GPU, or look at the riser",
            True,
        )
    now, highest = (readings.get(name, Reading()).value for name in ("pcie_generation", "pcie_generation_max"))
    if isinstance(now, int) and isinstance(highest, int) and now < highest:
        yield "pcie_generation", f"the PCIe link runs at generation {now} of {highest} after load", False
    power, default = (readings.get(name, Reading()).value for name in ("power_limit_w", "power_limit_default_w"))
    if isinstance(power, float) and isinstance(default, float) and power < default:
        yield "power_limit_w", f"the power limit is {power:.0f} W, the board's own is {default:.0f} W", False
    limited = readings.get("clocks_limited", Reading()).value
    if isinstance(limited, str) and limited != "none":
        yield "clocks_limited", f"the clocks were held down before any load: {limited}", False
    if readings.get("mig_enabled", Reading()).value is True:
        yield "mig_enabled", "MIG is enabled: NCCL cannot join its instances", False


def _node_states(readings: Readings) -> Iterable[State]:
    locked, ports = (readings.get(name, Reading()).value for name in ("memlock_gb", "infiniband_active"))
    if isinstance(ports, int) and ports > 0 and isinstance(locked, float) and locked < LOCKED_GB:
        text = f"only {locked:.3f} GB may be locked, and InfiniBand needs to lock its buffers: ulimit -l unlimited"
        yield "memlock_gb", text, True
    files = readings.get("open_files", Reading()).value
    if isinstance(files, float) and files < OPEN_FILES:
        yield (
            "open_files",
            f"only {files:,.0f} files may be open, and a large job may need {OPEN_FILES:,}: ulimit -n",
            False,
        )


STATES: dict[Scope, Callable[[Readings], Iterable[State]]] = {
    "gpu": _gpu_states,
    "node": _node_states,
    "job": lambda readings: (),
}
"""Functions that find problems in the readings of one unit, independently of limits."""
