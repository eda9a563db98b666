"""Draw the distribution of step times over ranks or runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.report.canvas import Picture, new_figure
from common.report.collect import ReportedRun
from common.report.curves import Floats, StepTimes, step_times
from common.report.lines import WIDTH, Line
from common.report.markup import number

MANY_RANKS = 24


def steps(lines: Sequence[Line]) -> Picture | None:
    """Return the picture of step times by rank of one run, or by run or subject of several; None without metrics."""
    boxes = _boxes(lines)
    if not boxes:
        return None
    one_run = len(lines) == 1
    figure, (axes,) = new_figure(WIDTH, [3.0])
    if len(boxes) > MANY_RANKS:
        _percentile_bands(axes, boxes)
        how = "Line: median. Band: 1st to 99th percentile"
    else:
        _draw_boxes(axes, boxes)
        how = "Box: 25th to 75th percentile. Line: median. Whiskers: 1st and 99th percentile"
    axes.set_ylabel("step time, ms")
    axes.set_xlabel("rank" if one_run else "")
    axes.margins(y=0.14)
    said = slowest(lines[0].run) if one_run else ""
    rows = tuple(
        (
            name,
            *(number(value) for value in (box.p1, box.p25, box.p50, box.p75, box.p99, box.longest)),
            f"{box.steps:,}",
        )
        for name, box, _ in boxes
    )
    return Picture(
        name="step_times",
        title="Step times of the ranks" if one_run else "Step times",
        alt=f"Distribution of step times in milliseconds of {len(boxes)} {'ranks' if one_run else 'runs'}. {said}",
        figure=figure,
        caption=f"{how}. {said}",
        head=("rank" if one_run else "run", "p1, ms", "p25", "p50", "p75", "p99", "longest", "steps"),
        rows=rows,
    )


def _boxes(lines: Sequence[Line]) -> list[tuple[str, StepTimes, str]]:
    """Return label, distribution and colour of each box: one per rank of a single run, else one per run of a set, or
    one per subject of a comparison.
    """
    if len(lines) == 1:
        line = lines[0]
        found = [(str(rank.rank), step_times(rank["step_ms"]), line.colour) for rank in line.run.ranks]
    else:
        several = len({line.subject for line in lines}) > 1
        pooled: dict[str, list[Floats]] = {}
        colours = {}
        for line in lines:
            name = line.subject if several else line.run.name
            pooled.setdefault(name, []).extend(rank["step_ms"] for rank in line.run.ranks)
            colours[name] = line.colour
        found = [
            (name, step_times(np.concatenate(measured)), colours[name]) for name, measured in pooled.items() if measured
        ]
    return [(name, times, colour) for name, times, colour in found if times is not None]


def _draw_boxes(axes: Any, boxes: Sequence[tuple[str, StepTimes, str]]) -> None:
    shapes = [
        {"label": name, "whislo": t.p1, "q1": t.p25, "med": t.p50, "q3": t.p75, "whishi": t.p99} for name, t, _ in boxes
    ]
    drawn = axes.bxp(shapes, showfliers=False, patch_artist=True, widths=min(0.55, 0.12 * len(boxes) + 0.1))
    for index, (_, _, colour) in enumerate(boxes):
        drawn["boxes"][index].set(facecolor=colour, edgecolor=colour, alpha=0.35)
        drawn["medians"][index].set(color=colour, linewidth=2.2)
        for part in (*drawn["whiskers"][2 * index : 2 * index + 2], *drawn["caps"][2 * index : 2 * index + 2]):
            part.set(color=colour, linewidth=1.2)
    if len(boxes) > 4 and max(len(name) for name, _, _ in boxes) > 3:
        axes.tick_params(axis="x", rotation=35)


def _percentile_bands(axes: Any, boxes: Sequence[tuple[str, StepTimes, str]]) -> None:
    x = np.arange(len(boxes))
    colour = boxes[0][2]
    low, median, high = (np.array([getattr(box, name) for _, box, _ in boxes]) for name in ("p1", "p50", "p99"))
    axes.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0, step="mid")
    axes.plot(x, median, color=colour, linewidth=1.6, drawstyle="steps-mid")
    positions = np.unique(np.linspace(0, len(boxes) - 1, 9).astype(int))
    axes.set_xticks(positions, [boxes[position][0] for position in positions])


def slowest(run: ReportedRun) -> str:
    """Return a sentence that names the slowest rank; empty for a single rank.

    Synchronized ranks have equal step times, and the slowest rank waits least for the others. Therefore exposed
    communication is subtracted first, if it was measured.
    """
    own = {}
    measured = bool(run.ranks) and all(rank.has("comm_wait_ms") for rank in run.ranks)
    for rank in run.ranks:
        values = rank["step_ms"] - (np.nan_to_num(rank["comm_wait_ms"]) if measured else 0.0)
        times = step_times(np.where(rank["step_ms"] > 0, values, np.nan))
        if times is not None:
            own[rank.rank] = times.p50
    if len(own) < 2:
        return ""
    worst = max(own, key=lambda rank: own[rank])
    excess = own[worst] / float(np.median(list(own.values()))) - 1
    what = "without communication " if measured else ""
    if excess < 0.005:
        return f"No rank stands out: median step times {what}differ by less than 0.5 % from their median."
    return f"Slowest: rank {worst}, whose median step {what}is {excess:.1%} longer than that of the median rank."
