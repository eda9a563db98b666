"""What all pictures of runs over time have in common: lines, the clock, the legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.report.canvas import COLOURS
from common.report.collect import Run

WIDTH = 6.0
"""Of a picture in inches: half a page on a screen, all of a phone."""
SHORT_MINUTES = 3.0
MANY_LINES = 8
"""More runs than this are not told apart by colour."""


@dataclass(frozen=True)
class Clock:
    """The unit of the time axis of a picture: minutes, or seconds where all runs are short."""

    name: str
    seconds: float

    def since(self, run: Run, time: Any) -> Any:
        """Epoch seconds as time since the run's start."""
        return (time - run.start) / self.seconds

    @property
    def label(self) -> str:
        """Of the axis."""
        return f"{self.name} since run_start"


MINUTES, SECONDS = Clock("minutes", 60.0), Clock("seconds", 1.0)


@dataclass(frozen=True)
class Line:
    """A run as it is drawn: its subject's name, its colour, and its label, None for none."""

    run: Run
    subject: str
    colour: str
    label: str | None


def clock_of(lines: Sequence[Line]) -> Clock:
    """Seconds where no run took more than three minutes."""
    return SECONDS if max(line.run.minutes for line in lines) <= SHORT_MINUTES else MINUTES


def strokes(lines: Sequence[Line]) -> dict[str, float]:
    """Width and opacity of curves: many are drawn finely and let each other through."""
    return {"linewidth": 1.0, "alpha": 0.45} if len(lines) > MANY_LINES else {"linewidth": 1.5, "alpha": 0.95}


def legend(axes: Any, lines: Sequence[Line]) -> None:
    """Name the colours above the axes, where there is more than one."""
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
    """Write on empty axes why they are empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=COLOURS["muted"])
