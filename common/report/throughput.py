"""Draw the picture of throughput over time, with power, clocks and temperature of the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from common.report.budget import brackets
from common.report.canvas import COLOURS, Picture, new_figure
from common.report.collect import ReportedRun
from common.report.curves import mean_over_time, rate
from common.report.lines import WIDTH, Clock, Line, clock_of, legend, strokes
from common.report.markup import figure_of, is_number

RATE_BINS = 120
READINGS = {
    "power_w": "power, W",
    "sm_clock_mhz": "SM clock, MHz",
    "memory_clock_mhz": "memory clock, MHz",
    "temperature_c": "temperature, °C",
}


def throughput(lines: Sequence[Line]) -> Picture | None:
    """Return the picture of samples per second, with GPU readings if the metrics have them; None without any data."""
    drawn = [line for line in lines if line.run.ranks or logged_throughput(line.run)]
    if not drawn:
        return None
    readings = [name for name in READINGS if any(rank.has(name) for line in drawn for rank in line.run.ranks)]
    clock = clock_of(drawn)
    figure, axes = new_figure(WIDTH, [2.3, *([1.0] * len(readings))])
    rows = []
    for line in drawn:
        x, y = _throughput_curve(line.run, clock)
        axes[0].plot(x, y, color=line.colour, **strokes(drawn))
        if len(drawn) == 1:
            axes[0].fill_between(x, y, color=line.colour, alpha=0.10, linewidth=0)
        mean = mean_throughput(line.run)
        spread = (float(np.min(y)), float(np.median(y)), float(np.max(y))) if len(y) else (np.nan,) * 3
        rows.append((line.run.name, "unknown" if mean is None else figure_of(mean), *map(figure_of, spread)))
    if len(drawn) == 1:
        _shade_evaluations(axes[0], drawn[0].run, clock)
        mean = mean_throughput(drawn[0].run)
        if mean is not None:
            axes[0].axhline(mean, color=COLOURS["muted"], linewidth=1, linestyle=(0, (2, 2)))
    axes[0].set_ylim(0, 1.06 * axes[0].get_ylim()[1])
    axes[0].set_ylabel("samples/s")
    axes[0].yaxis.set_major_formatter(EngFormatter(sep=" "))
    for one, name in zip(axes[1:], readings, strict=True):
        _reading(one, drawn, name, clock)
    axes[-1].set_xlabel(clock.label)
    legend(axes[0], lines)
    measured = all(line.run.ranks for line in drawn)
    caption = (
        "Training samples per second, pauses included. Shaded: evaluation. Dotted: mean of the run."
        if measured and len(drawn) == 1
        else "Training samples per second, pauses included."
        if measured
        else "Throughput as in the log, in the unit of the program that wrote it."
    )
    return Picture(
        name="throughput",
        title="Throughput",
        alt="Curves of training samples per second over the run"
        + (", with " + ", ".join(READINGS[name] for name in readings) if readings else "") + ".",
        figure=figure,
        caption=caption + (" Power and clocks: mean over the ranks' GPUs." if readings else ""),
        head=("run", "mean", "lowest", "median", "highest"),
        rows=tuple(rows),
    )  # fmt: skip


def _throughput_curve(run: ReportedRun, clock: Clock) -> tuple[Any, Any]:
    """Return times and samples per second from the metrics, else from the log."""
    if run.ranks:
        rank = run.ranks[0]
        bins = max(4, min(RATE_BINS, len(rank) // 4))
        seconds, values = rate(rank["time"], rank["samples"], run.start, run.stop, bins)
        return clock.since(run, seconds), values
    points = logged_throughput(run)
    return clock.since(run, np.array([time for time, _ in points])), np.array([value for _, value in points])


def logged_throughput(run: ReportedRun) -> list[tuple[float, float]]:
    """Return epoch seconds and throughput of each entry in the log; the unit depends on the program that wrote it."""
    points = []
    for event in run.log.events:
        value = event.value
        if event.key == "tracked_stats" and isinstance(value, dict):
            value = value.get("throughput")
        elif event.key != "throughput":
            continue
        if is_number(value):
            points.append((event.time_ms / 1000, float(value)))
    return points


def mean_throughput(run: ReportedRun) -> float | None:
    """Return the training samples per second of the whole run; None without metrics."""
    if not run.ranks or run.stop <= run.start:
        return None
    samples = run.ranks[0]["samples"]
    if len(samples) < 2:
        return None
    return float((samples[-1] - samples[0] + (samples[1] - samples[0])) / (run.stop - run.start))


def _reading(axes: Any, lines: Sequence[Line], name: str, clock: Clock) -> None:
    label, _, unit = READINGS[name].rpartition(", ")
    axes.set_ylabel(f"{label}\n{unit}", fontsize=8.5)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    for line in lines:
        ranks = [rank for rank in line.run.ranks if rank.has(name)]
        if ranks:
            seconds = np.concatenate([rank["time"] for rank in ranks])
            values = np.concatenate([rank[name] for rank in ranks])
            x, y = mean_over_time(seconds, values, line.run.start, line.run.stop, RATE_BINS)
            axes.plot(clock.since(line.run, x), y, color=line.colour, **strokes(lines))


def _shade_evaluations(axes: Any, run: ReportedRun, clock: Clock) -> None:
    for begin, end in brackets(run.log, ("eval_start", "eval_stop"), round(run.stop * 1000)):
        left, right = (min(max(edge / 1000, run.start), run.stop) for edge in (begin, end))
        if left < right:
            axes.axvspan(clock.since(run, left), clock.since(run, right), color=COLOURS["c2"], alpha=0.16, linewidth=0)
