"""Draw pictures of results: times and score of a set, convergence and reference, times and published results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator
from mlperf_logging.rcp_checker import rcp_checker

from common.mlperf.compliance import quiet_logging
from common.mlperf.rcp import has_rcps, reference_at
from common.mlperf.rules import Rules, round_name
from common.report.canvas import COLOURS, Picture, new_figure
from common.report.collect import Subject
from common.report.lines import WIDTH, Line
from common.report.markup import minutes_of, plural
from common.report.published_results import PublishedResult, nearest, published_for

MOST_PUBLISHED = 10
MOST_LEVEL_FIGURES = 10
"""Largest number of bars with horizontal numbers; with more bars, the numbers are rotated."""
FAR_APART = 20.0
"""Ratio of slowest to fastest time above which the axis is logarithmic."""


def times(subject: Subject, number: int = 0) -> Picture:
    """Return the picture with the time of each run of a set, and the score. Runs that do not count are pale.

    Args:
        number: number of the set on the page, from 1; 0 for the only set.
    """
    score = subject.score
    chosen = {run.log.path for run in score.chosen if run.log is not None} if score is not None else set()
    kept = _kept(subject)
    figure, (axes,) = new_figure(WIDTH, [2.8])
    rows = []
    for position, run in enumerate(subject.runs):
        converged = run.verdict.minutes is not None
        colour = COLOURS["c0"] if converged else COLOURS["target"]
        faded = bool(chosen) and run.log.path not in kept
        bars = axes.bar(position, run.minutes, color=colour, alpha=0.35 if faded else 0.9, width=0.7)
        crowd = len(subject.runs) > MOST_LEVEL_FIGURES
        # In the middle of the bar, because the line of the score passes near its top.
        axes.bar_label(
            bars, [minutes_of(run.minutes)], label_type="center", color=COLOURS["ink" if faded else "paper"],
            fontsize=7 if crowd else 8.5, rotation=90 if crowd else 0,
        )  # fmt: skip
        role = "" if not chosen else "dropped" if faded else "counts"
        if not converged:
            role = "refused" if run.verdict.kind == "refused" else "did not converge"
        rows.append((run.name, minutes_of(run.minutes), run.status, role))
    if score is not None and score.olympic_minutes is not None:
        level = score.minutes if score.minutes is not None else score.olympic_minutes
        what = "score" if score.minutes is not None else "olympic mean"
        axes.axhline(level, color=COLOURS["ink"], linewidth=1.3, linestyle=(0, (5, 3)))
        axes.annotate(
            f"{what}\n{minutes_of(level)} min", (1.0, level), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", ha="left", va="center", fontsize=8.5,
        )  # fmt: skip
    every = max(1, len(subject.runs) // 10)
    shown = range(0, len(subject.runs), every)
    axes.set_xticks(list(shown), [subject.runs[position].name.removeprefix("run ") for position in shown])
    axes.set_xlabel("run")
    axes.set_ylabel("minutes")
    axes.margins(y=0.15)
    failed = any(run.verdict.minutes is None for run in subject.runs)
    dropped = (
        "Pale: runs that do not count, because the olympic mean drops the fastest and slowest, or others were chosen. "
        if chosen
        else ""
    )
    return Picture(
        name=f"times_{number}" if number else "times",
        title=f"Times of the runs of {subject.name}" if number else "Times of the runs",
        alt=f"Bars of the times of {len(subject.runs)} runs, from {minutes_of(min(r.minutes for r in subject.runs))} "
        f"to {minutes_of(max(r.minutes for r in subject.runs))} minutes.",
        figure=figure,
        caption=dropped + ("Red: runs that did not converge, or whose log is refused." if failed else ""),
        head=("run", "minutes", "status", "in the score"),
        rows=tuple(rows),
    )


def _kept(subject: Subject) -> set[Any]:
    """Return the paths of the logs whose times the olympic mean keeps; a failed run counts as the slowest."""
    if subject.score is None or subject.score.window is None:
        return set()
    dropped = subject.rules.dropped
    ranked = sorted(
        (run for run in subject.score.chosen if run.log is not None),
        key=lambda run: float("inf") if run.verdict.minutes is None else run.verdict.minutes,
    )
    return {run.log.path for run in ranked[dropped : len(ranked) - dropped] if run.log is not None}


@dataclass(frozen=True)
class ReferenceRuns:
    """Reference runs at one global batch; ``counts`` is the training until convergence, in the unit of the rules."""

    batch: int
    counts: tuple[float, ...]


def reference_runs(rules: Rules, global_batch: int) -> list[ReferenceRuns]:
    """Return the checker's reference runs at a global batch, else at the nearest below and above; empty without any."""
    if not has_rcps(rules.log_name, rules.ruleset):
        return []
    with quiet_logging():
        checker = rcp_checker.RCP_Checker(rules.usage, rules.ruleset, rules.log_name, False)
    found = {int(record["BS"]): record["Epochs to converge"] for record in checker.pruned_rcp_data.values()}
    if global_batch in found:
        batches = [global_batch]
    else:
        below, above = ([b for b in found if b < global_batch], [b for b in found if b > global_batch])
        batches = [*([max(below)] if below else []), *([min(above)] if above else [])]
    return [ReferenceRuns(batch, tuple(float(count) for count in found[batch])) for batch in batches]


def convergence(lines: Sequence[Line]) -> Picture | str:
    """Return the picture of training until convergence with the reference runs, or a sentence why it is missing."""
    first = lines[0].run
    batches = {str(line.run.log.global_batch) for line in lines}
    if first.log.division != "closed":
        return "Open division: convergence is not compared with the reference."
    if len(batches) > 1:
        return f"The runs have different global batches, {', '.join(sorted(batches))}; each has its own reference."
    batch = first.log.global_batch
    reference = reference_runs(first.rules, batch) if isinstance(batch, int) else []
    if not isinstance(batch, int) or not reference:
        return f"There are no reference convergence points of {first.rules.log_name} in {first.rules.ruleset}."
    bounds = reference_at(first.rules, batch)
    ours: dict[str, list[float]] = {line.subject: [] for line in lines}
    for line in lines:
        if line.run.convergence is not None:
            ours[line.subject].append(line.run.convergence)
    colours = {line.subject: line.colour for line in reversed(lines)}
    named = [
        *((f"reference,\nbatch {runs.batch:,}", list(runs.counts), COLOURS["c7"]) for runs in reference),
        *((name if len(ours) > 1 else "these runs", values, colours[name]) for name, values in ours.items() if values),
    ]
    figure, (axes,) = new_figure(WIDTH, [1.1 + 0.75 * len(named)])
    for row, (_, values, colour) in enumerate(named):
        _dots(axes, row, values, colour)
    axes.set_yticks(range(len(named)), [name for name, _, _ in named])
    axes.set_ylim(len(named) - 0.25, -0.75)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_xlabel(f"{plural(first.rules.unit)} until the target was reached")
    if named[0][1][0] >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=first.rules.unit == "epoch"))
    axes.margins(x=0.06)
    rows = [
        (name.replace("\n", " "), f"{len(values)}", *(f"{f(values):.5g}" for f in (np.mean, min, max)))
        for name, values, _ in named
        if values
    ]
    caption = "The global batch is larger than that of all reference points, so there is no limit."
    if bounds is not None:
        left = axes.get_xlim()[0]
        axes.axvspan(min(left, bounds.limit), bounds.limit, color=COLOURS["target"], alpha=0.10, linewidth=0)
        axes.axvline(bounds.limit, color=COLOURS["target"], linewidth=1.3)
        axes.axvline(bounds.mean, color=COLOURS["ink"], linewidth=1.2, linestyle=(0, (5, 3)))
        how = {
            "exact": "at this batch",
            "interpolated": "interpolated for this batch",
            "smallest": "at the smallest batch",
        }
        caption = (
            f"Dashed: olympic mean of the reference convergence points of {round_name(first.rules.ruleset)} "
            f"{how[bounds.found]}, {bounds.mean:.5g}. Red: a set whose mean is "
            f"below {bounds.limit:.5g} converges faster than is plausible and is refused."
        )
    return Picture(
        name="convergence",
        title="Convergence compared with the reference",
        alt=f"Dots of the {plural(first.rules.unit)} to the target: {sum(len(r.counts) for r in reference)} of the "
        f"reference's runs and {sum(map(len, ours.values()))} of these. {caption}",
        figure=figure,
        caption=caption,
        head=("runs", "number", "mean", "least", "most"),
        rows=tuple(rows),
    )


def _dots(axes: Any, row: int, values: Sequence[float], colour: str) -> None:
    """Draw one dot per value; equal values are stacked around the row."""
    for value, count in Counter(values).items():
        heights = row + (np.arange(count) - (count - 1) / 2) * min(0.11, 1.0 / count)
        axes.plot(np.full(count, value), heights, "o", color=colour, markersize=5.2, alpha=0.85, markeredgewidth=0)


def beside_published(subjects: Sequence[Subject]) -> Picture | str:
    """Return the picture of the times next to published results of the same task, or a sentence why it is missing."""
    first = subjects[0]
    if first.log.division != "closed":
        return "Open division: the published results known here are of the closed division."
    own = [(subject, minutes) for subject in subjects if (minutes := _minutes(subject)) is not None]
    if not own:
        return "There is no time that counts: the target was missed, a log is refused, or a set has no score."
    found = nearest(published_for(first.rules), first.chips or len(first.runs[0].ranks) or None, MOST_PUBLISHED)
    if not found:
        return f"No published result of {first.rules.benchmark} with these targets is known here."
    bars: list[tuple[str, float, PublishedResult | Subject]] = [
        *((result.name, result.minutes, result) for result in found),
        *((f"{subject.name} (unverified)", minutes, subject) for subject, minutes in own),
    ]
    bars.sort(key=lambda bar: bar[1])
    figure, (axes,) = new_figure(WIDTH, [0.8 + 0.3 * len(bars)])
    wide = bars[-1][1] > FAR_APART * bars[0][1] > 0
    for row, (_, minutes, what) in enumerate(bars):
        ours = isinstance(what, Subject)
        colour, alpha = COLOURS["c0" if ours else "c7"], 1.0 if ours else 0.45
        if wide:  # dots, because the length of a bar has no meaning on a logarithmic axis
            axes.plot(minutes, row, "o", color=colour, alpha=alpha, markersize=8, markeredgewidth=0)
        else:
            axes.barh(row, minutes, color=colour, alpha=alpha, height=0.66)
        axes.annotate(
            minutes_of(minutes), (minutes, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8.5,
        )  # fmt: skip
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_xlabel("minutes to train")
    axes.set_xlim(0, 1.13 * bars[-1][1])
    if wide:
        axes.set_xscale("log")
        axes.set_xlim(bars[0][1] / 2, bars[-1][1] * 3)
        axes.xaxis.set_major_locator(LogLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    rows = tuple(_published_row(minutes, what) for _, minutes, what in bars)
    return Picture(
        name="published",
        title="Comparison with published results",
        alt=f"Minutes to train: {len(own)} of this report, unverified, and {len(found)} published results.",
        figure=figure,
        caption="Blue: this report, unverified, not verified by MLCommons Association; one run is never a score. "
        "Grey: published MLPerf Training results of the closed division.",
        head=("result", "version", "division", "category", "chips", "minutes", "source"),
        rows=rows,
    )


def _minutes(subject: Subject) -> float | None:
    """Return the minutes to compare with published scores: a set's score or a converged run's time; else None."""
    if subject.score is not None:
        return subject.score.minutes
    return subject.runs[0].verdict.minutes


def _published_row(minutes: float, what: PublishedResult | Subject) -> tuple[str, ...]:
    time = minutes_of(minutes)
    if isinstance(what, PublishedResult):
        maker = f"{what.submitter}, {what.accelerator}"
        return (
            maker,
            round_name(what.ruleset),
            "closed",
            "see the round's table",
            f"{what.chips:,}",
            time,
            what.source,
        )
    source = "this report: unverified" + ("" if what.score is not None else ", one run")
    return (what.name, *placing(what), time, source)


def placing(subject: Subject) -> tuple[str, str, str, str]:
    """Return the details that MLPerf's rules require in comparisons: version, division, category and chips."""
    log = subject.log
    chips = "not recorded" if subject.chips is None else f"{subject.chips:,}" if subject.chips else "none: CPU"
    kind = "synthetic" if log.synthetic else "custom"
    division = f"none: {kind} data" if subject.other_data else str(log.division)
    return round_name(subject.rules.ruleset), division, str(log.value("submission_status")), chips
