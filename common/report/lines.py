"""Shared parts of all pictures of runs over time: lines, time unit and legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.report.canvas import COLOURS
from common.report.collect import ReportedRun

WIDTH = 6.0
"""Width of a picture in inches: half a page on a screen, the full width of a phone."""
SHORT_MINUTES = 3.0
MANY_LINES = 8
"""Largest number of runs that have different colours."""


@dataclass(frozen=True)
class Clock:
    """Unit of the time axis of a picture: minutes, or seconds if all runs are short."""

    name: str
    seconds: float

    def since(self, run: ReportedRun, time: Any) -> Any:
        """Convert epoch seconds to the time since the start of the run, in this unit."""
        return (time - run.start) / self.seconds

    @property
    def label(self) -> str:
        """Label of the time axis."""
        return f"{self.name} since run_start"


MINUTES, SECONDS = Clock("minutes", 60.0), Clock("seconds", 1.0)


@dataclass(frozen=True)
class Line:
    """A run with the name of its subject, its colour, and its label in the legend (None: no entry)."""

    run: ReportedRun
    subject: str
    colour: str
    label: str | None


def clock_of(lines: Sequence[Line]) -> Clock:
    """Return seconds as the unit if no run took more than three minutes, else minutes."""
    return SECONDS if max(line.run.minutes for line in lines) <= SHORT_MINUTES else MINUTES


def strokes(lines: Sequence[Line]) -> dict[str, float]:
    """Return line width and opacity of curves: thin and transparent if there are many."""
    return {"linewidth": 1.0, "alpha": 0.45} if len(lines) > MANY_LINES else {"linewidth": 1.5, "alpha": 0.95}


def legend(axes: Any, lines: Sequence[Line]) -> None:
    """Draw the legend above the axes if there are several lines."""
    named = [line for line in lines if line.label is not None]
    if len(lines) < 2 or not named:
        return
    handles = [axes.plot([], [], color=line.colour, linewidth=2)[0] for line in named]
    axes.legend(
        handles,
        [str(line.label) for line in named],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=3,
        borderaxespad=0.2,
    )


def say(axes: Any, text: str) -> None:
    """Write ``text`` in the middle of the axes, to explain why they are empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=COLOURS["muted"])
