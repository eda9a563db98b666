"""Figures as the page writes them."""

from __future__ import annotations

from typing import TypeGuard

from common.mlperf.rules import Target


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value out of a log is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def figure_of(value: float) -> str:
    """A throughput or a count: thousands separated, three significant digits where it is small."""
    if value != value:
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def number(value: float) -> str:
    """A time, with at most two decimals and at least two significant digits."""
    if value != value:
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}" if abs(value) >= 1 else f"{value:.2g}"


def duration(milliseconds: float) -> str:
    """A time span in its own best unit."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{milliseconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.1f} min"


def minutes_of(value: float) -> str:
    """A run's time as results quote it, in minutes."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def relation(target: Target) -> str:
    """On which side of the target quality must be."""
    sign = "≥" if target.direction == "at_least" else "≤"
    return sign if target.target_allowed else sign.translate({ord("≥"): ">", ord("≤"): "<"})


def plural(unit: str) -> str:
    """The unit in which the rules count progress, as the name of an axis."""
    return unit if unit.endswith("s") else f"{unit}s"


def legible(text: str, longest: int = 60) -> str:
    """Text out of a log or a file name as a label: on one line, of characters that can be drawn, and not too long."""
    drawn = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return drawn if len(drawn) <= longest else drawn[: longest - 1] + "…"
