"""Format the results of doctor for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from common.doctor.findings import Finding, MeasuredUnit
from common.doctor.reading import MEASURES, Scope, Value, measure_of

ROWS = 64
"""Largest number of units with a row each; for more, the table has lowest, median, highest and the unfit units."""


def format_report(units: Sequence[MeasuredUnit], findings: Sequence[Finding], title: str) -> str:
    """Return tables of nodes and GPUs, the readings of the job, the findings, and the verdict in the last line.

    Args:
        findings: findings in the order of the report.
    """
    named = {finding.where for finding in findings if finding.unfit}
    parts = [title]
    for scope in ("node", "gpu"):
        rows = [unit for unit in units if unit.scope == scope]
        if rows:
            parts.append(_table(scope, rows, named))
    parts += _job(units)
    for heading, chosen in (
        ("Unfit:", [finding for finding in findings if finding.unfit]),
        ("Notes:", [finding for finding in findings if not finding.unfit and finding.kind != "not made"]),
        ("Checks that could not run:", [finding for finding in findings if finding.kind == "not made"]),
    ):
        if chosen:
            parts.append("\n".join([heading, *(f"  {finding.text}" for finding in chosen)]))
    parts.append(_verdict(units, findings))
    return "\n\n".join(parts)


def count_checks(units: Sequence[MeasuredUnit]) -> dict[str, int]:
    """Return the number of readings that were made, not made, and failed."""
    readings = [reading for unit in units for reading in unit.readings.values()]
    failed = sum(bool(reading.failed) for reading in readings)
    not_made = sum(bool(reading.missing) for reading in readings)
    return {"made": len(readings) - failed - not_made, "not_made": not_made, "failed": failed}


def _verdict(units: Sequence[MeasuredUnit], findings: Sequence[Finding]) -> str:
    counts = count_checks(units)
    unfit = sum(finding.unfit for finding in findings)
    values = "1 value" if counts["made"] == 1 else f"{counts['made']} values"
    summary = f"{values} read, {counts['not_made']} not available, {counts['failed']} failed"
    return f"UNFIT: {unfit} {'finding' if unfit == 1 else 'findings'}; {summary}" if unfit else f"FIT: {summary}"


def _table(scope: Scope, rows: Sequence[MeasuredUnit], named: set[str]) -> str:
    columns = [name for name in _figures(rows) if measure_of(scope, name).heading]
    if len(rows) <= ROWS:
        body = [[unit.where, *(_cell(scope, name, unit) for name in columns)] for unit in rows]
    else:
        body = [[label, *(_spread(scope, name, rows, part) for name in columns)] for label, part in SPREAD]
        body += [[unit.where, *(_cell(scope, name, unit) for name in columns)] for unit in rows if unit.where in named]
    first = "node" if scope == "node" else "GPU"
    heads = [[first, *(measure_of(scope, name).heading for name in columns)]]
    heads.append(["", *(measure_of(scope, name).unit for name in columns)])
    widths = [max(len(row[index]) for row in [*heads, *body]) for index in range(len(columns) + 1)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in [*heads, *body]
    ]
    return "\n".join(line.rstrip() for line in lines)


def _figures(rows: Sequence[MeasuredUnit]) -> list[str]:
    """Return the names of all readings that any row has a value of, in the order of ``MEASURES``."""
    present = {name for unit in rows for name, reading in unit.readings.items() if reading.value is not None}
    order = list(MEASURES[rows[0].scope])
    return sorted(present, key=lambda name: (order.index(name.partition("@")[0]), name))


def _cell(scope: Scope, name: str, unit: MeasuredUnit) -> str:
    reading = unit.readings.get(name)
    if reading is None or reading.value is None:
        return "failed" if reading is not None and reading.failed else "-"
    return _number(scope, name, reading.value)


def _number(scope: Scope, name: str, value: Value) -> str:
    measure = measure_of(scope, name)
    shown = measure.show(value)
    return shown.removesuffix(measure.unit).strip() if measure.unit else shown


SPREAD = (("lowest", 0.0), ("median", 0.5), ("highest", 1.0))


def _spread(scope: Scope, name: str, rows: Sequence[MeasuredUnit], part: float) -> str:
    readings = [unit.readings[name].value for unit in rows if name in unit.readings]
    numbers = sorted(float(value) for value in readings if isinstance(value, int | float))
    if not numbers:
        texts = {str(value) for value in readings if value is not None}
        return texts.pop() if len(texts) == 1 else "differs"
    return _number(scope, name, numbers[round(part * (len(numbers) - 1))])


def _job(units: Sequence[MeasuredUnit]) -> list[str]:
    lines = []
    for unit in units:
        for name, reading in unit.readings.items() if unit.scope == "job" else ():
            if reading.value is not None:
                measure = measure_of("job", name)
                lines.append(f"  {measure.title}: {measure.show(reading.value)}")
    return ["\n".join(["All ranks", *lines])] if lines else []
