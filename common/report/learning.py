"""Draw the picture of quality, with its target, and training loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.ticker import EngFormatter, FuncFormatter

from common.report.canvas import COLOURS, Picture, new_figure
from common.report.collect import ReportedRun
from common.report.curves import Floats, envelope
from common.report.lines import MANY_LINES, WIDTH, Clock, Line, clock_of, legend, say, strokes
from common.report.markup import is_number, legible, number, plural, relation

Over = Literal["time", "progress"]
LOSS_KEYS = ("train_loss", "reduced_train_loss", "loss")
"""Names of the training loss in logs of various programs, as an event or within ``tracked_stats``."""


def learning(lines: Sequence[Line], over: Over) -> Picture:
    """Return the picture of quality, with its target, and training loss, over time since run_start or over progress."""
    first, clock = lines[0].run, clock_of(lines)
    metrics = first.metrics or ("quality",)
    with_loss = [line for line in lines if len(_loss(line.run).values)]
    figure, axes = new_figure(WIDTH, [2.1] * len(metrics) + [1.9] * bool(with_loss))
    for one, metric in zip(axes, metrics, strict=False):
        _quality(one, lines, metric, over, clock)
    if with_loss:
        _losses(axes[-1], with_loss, over, clock)
    unit = first.rules.unit
    axes[-1].set_xlabel(clock.label if over == "time" else plural(unit))
    if over == "progress":
        axes[-1].xaxis.set_major_formatter(EngFormatter(sep=" "))
    legend(axes[0], lines)
    names = {metric: _metric_name(metric, first) for metric in metrics}
    rows = tuple(
        (line.run.name, names[metric], number(float(clock.since(line.run, at))), f"{progress:g}", f"{value:.5g}")
        for line in lines
        for metric in metrics
        for at, progress, value in _ends(line.run.quality(metric))
    )
    reached = sum(line.run.status == "success" for line in lines)
    wanted = ", ".join(f"{names[m]} {relation(t)} {t.value:g}" for m, t in _with_targets(first)) or "none"
    return Picture(
        name=f"quality_over_{over}",
        title="Quality and loss",
        alt=f"Curves of {', '.join(names.values())} and training loss over {over}; target {wanted}; "
        f"{reached} of {len(lines)} runs reached it.",
        figure=figure,
        caption=_learning_caption(first, bool(with_loss)),
        head=("run", "metric", clock.name, unit, "value"),
        rows=rows,
    )


def _quality(axes: Any, lines: Sequence[Line], metric: str, over: Over, clock: Clock) -> None:
    axes.set_ylabel(_metric_name(metric, lines[0].run))
    for name, target in _with_targets(lines[0].run):
        if name == metric:
            axes.axhline(target.value, color=COLOURS["target"], linewidth=1.3, linestyle=(0, (5, 3)))
            # Beside the axes, because within them the text would cover the last points, which are at the target.
            axes.annotate(
                f"target\n{relation(target)} {target.value:g}",
                (1.0, target.value), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
                ha="left", va="center", color=COLOURS["target"], fontsize=8.5,
            )  # fmt: skip
    for line in lines:
        points = line.run.quality(metric)
        x = [clock.since(line.run, time) if over == "time" else progress for time, progress, _ in points]
        marker = "o" if len(points) <= 60 and len(lines) <= MANY_LINES else ""
        axes.plot(
            x, [value for _, _, value in points], color=line.colour, marker=marker, markersize=4, **strokes(lines)
        )
    if not any(line.run.quality(metric) for line in lines):
        say(axes, "no evaluation in the log")
    axes.margins(y=0.14)


def _losses(axes: Any, lines: Sequence[Line], over: Over, clock: Clock) -> None:
    axes.set_ylabel("training loss")
    lowest, highest = np.inf, -np.inf
    for line in lines:
        loss = _loss(line.run)
        x = clock.since(line.run, loss.time) if over == "time" else loss.progress
        curve = envelope(x, loss.values, 300)
        if not len(curve.x):
            continue
        if curve.binned and len(lines) <= 3:
            axes.fill_between(curve.x, curve.low, curve.high, color=line.colour, alpha=0.22, linewidth=0)
        axes.plot(curve.x, curve.mean, color=line.colour, **strokes(lines))
        lowest, highest = min(lowest, float(curve.low.min())), max(highest, float(curve.high.max()))
    if lowest > 0 and highest > 30 * lowest:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


@dataclass(frozen=True)
class _Loss:
    """Training loss of a run: epoch seconds, progress in the unit of the rules (NaN if unknown), and values."""

    time: Floats
    progress: Floats
    values: Floats


def _loss(run: ReportedRun) -> _Loss:
    """Return the training loss from the metrics of the first rank that has one, else from the log."""
    for rank in run.ranks:
        if rank.has("loss"):
            return _Loss(rank["time"], _progress(run, rank["samples"]), rank["loss"])
    points = []
    for event in run.log.events:
        stats = event.value if isinstance(event.value, dict) else {}
        value = event.value if event.key in LOSS_KEYS else next((stats[k] for k in LOSS_KEYS if k in stats), None)
        at = event.metadata.get(run.rules.progress_key)
        if is_number(value) and run.start <= event.time_ms / 1000 <= run.stop:
            points.append((event.time_ms / 1000, float(at) if is_number(at) else np.nan, float(value)))
    table = np.array(points).reshape(-1, 3)
    return _Loss(table[:, 0], table[:, 1], table[:, 2])


def _progress(run: ReportedRun, samples: Floats) -> Floats:
    """Convert samples to epochs if the rules count epochs and the log has their size; else return the samples."""
    size = run.log.value("train_samples")
    if run.rules.unit.startswith("epoch") and is_number(size) and size > 0:
        return samples / float(size)
    return samples


def _learning_caption(run: ReportedRun, with_loss: bool) -> str:
    parts = []
    if run.log.other_data and not run.targets:
        parts.append(
            "No target is drawn: the data are not those of the benchmark, and the log does not have the run's target."
        )
    if with_loss:
        parts.append("Loss: with many steps, the line is the mean of neighbouring steps, and the band their range.")
    else:
        parts.append("Neither the metrics nor the log contain the training loss.")
    return " ".join(parts)


def _with_targets(run: ReportedRun) -> list[tuple[str, Any]]:
    """Return each metric of the run that has a target, with the target."""
    metrics = run.metrics
    if len(run.targets) == 1 and len(metrics) == 1:
        return [(metrics[0], run.targets[0])]
    return [(target.metric, target) for target in run.targets if target.metric in metrics]


def _metric_name(metric: str, run: ReportedRun) -> str:
    name = metric.removeprefix("eval_").replace("_", " ") if metric == run.rules.quality_key else metric
    return legible(name, 30)


def _ends(points: Sequence[Any]) -> list[Any]:
    """Return all of up to 12 points, else the first and the last eight."""
    return list(points) if len(points) <= 12 else [points[0], *points[-8:]]
