"""Format numbers, units and labels for the page."""

from __future__ import annotations

from typing import TypeGuard

from common.mlperf.rules import Target


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value from a log is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def figure_of(value: float) -> str:
    """Format a throughput or a count: separate thousands; below 100, three significant digits."""
    if value != value:
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def number(value: float) -> str:
    """Format a time: no decimals from 1000, two decimals from 1, else two significant digits."""
    if value != value:
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}" if abs(value) >= 1 else f"{value:.2g}"


def duration(milliseconds: float) -> str:
    """Format a duration in milliseconds, seconds or minutes, depending on its length."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{milliseconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.1f} min"


def minutes_of(value: float) -> str:
    """Format the minutes of a run as in published results, without unit."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def relation(target: Target) -> str:
    """Return the relation between quality and target that the rules require: ``≥``, ``>``, ``≤`` or ``<``."""
    sign = "≥" if target.direction == "at_least" else "≤"
    return sign if target.target_allowed else sign.translate({ord("≥"): ">", ord("≤"): "<"})


def plural(unit: str) -> str:
    """Return the plural of the rules' unit of progress, for an axis label."""
    return unit if unit.endswith("s") else f"{unit}s"


def legible(text: str, longest: int = 60) -> str:
    """Convert text from a log or file name to a label: replace unprintable characters, and cut it to ``longest``."""
    drawn = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return drawn if len(drawn) <= longest else drawn[: longest - 1] + "…"
