"""Page of ``mlperf-suite estimate``: one HTML file with plots of time, parts of a step, energy and uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

from common.config.system import Hardware
from common.planning.compute import not_modelled
from common.planning.convergence import curve_of
from common.planning.estimate_text import (
    COLUMNS,
    PART_NAMES,
    best_plans,
    cells_of,
    count_of,
    input_sentences,
    verdict_of,
)
from common.planning.estimates import RunEstimate
from common.planning.run_model import best_measurement
from common.planning.search import Plan
from common.report.canvas import COLOURS, SERIES, Picture, new_figure, styled
from common.report.cards import html_page, picture_card
from common.report.markup import Html, join, minutes_of, number, table, tag

WIDTH = 6.0
"""Width of a picture in inches: half a page on a screen."""
COLOURS_OF_BARS = (*SERIES, COLOURS["muted"], COLOURS["target"])


def page_of(
    benchmark: str, rows: Mapping[int, Sequence[Plan]], hardware: Hardware, system: str, train_system: str | None
) -> str:
    """Return the page.

    Args:
        rows: best plan of each batch, by number of GPUs; at least one.
        system: name or path of the system.
        train_system: name of the system for `train`; None to leave it out.
    """
    best = best_plans(rows)
    estimates = {gpus: plan.estimate for gpus, plan in best.items()}
    pictures = styled(
        lambda: [
            _times(rows, estimates),
            _steps(estimates),
            _samples(benchmark, estimates),
            _uncertainty(estimates),
            *([_energy(estimates)] if any(each.joules for each in estimates.values()) else []),
        ]
    )
    title = f"{benchmark} on {system}: estimated time to train"
    written = "Written by mlperf-suite estimate. The page is one file and loads nothing from the network."
    missing = not_modelled(benchmark)
    said = (verdict_of(best), f"Not modelled: {missing}." if missing else "", *input_sentences(best))
    all_rows = tuple(cells_of(plan.estimate) for gpus in best for plan in rows[gpus])
    body = join(
        tag(
            "header",
            tag("p", f"Estimates for {hardware.gpu} from measured steps", class_="eyebrow"),
            tag("h1", title),
            _tiles(estimates),
            *(tag("p", sentence, class_="said") for sentence in said if sentence),
        ),
        tag(
            "main",
            tag("div", *(picture_card(each, each.name) for each in pictures), class_="pictures"),
            _settings(best, train_system),
            tag("section", tag("h2", "All estimates"), table(COLUMNS, all_rows, "All estimates"), class_="card"),
        ),
        tag("footer", tag("p", written)),
    )
    return html_page(title, body)


def _tiles(estimates: Mapping[int, RunEstimate]) -> Html:
    tiles = []
    for gpus, each in estimates.items():
        low, high = (minutes_of(seconds / 60) for seconds in each.interval())
        interval = tag("small", f" {low} to {high}")
        tiles.append(tag("div", tag("dt", count_of(gpus)), tag("dd", f"{minutes_of(each.seconds / 60)} min", interval)))
    return tag("dl", *tiles, class_="tiles", style=f"--columns:{min(4, len(tiles))}")


def _times(rows: Mapping[int, Sequence[Plan]], estimates: Mapping[int, RunEstimate]) -> Picture:
    figure, (axes,) = new_figure(WIDTH, [3.2])
    others = [plan.estimate for plans in rows.values() for plan in plans]
    axes.scatter(
        [each.layout.gpus for each in others], [each.seconds / 60 for each in others], s=14, color=COLOURS["c7"],
        alpha=0.6, label="other batches",
    )  # fmt: skip
    counts = list(estimates)
    minutes = [each.seconds / 60 for each in estimates.values()]
    limits = [[seconds / 60 for seconds in each.interval()] for each in estimates.values()]
    errors = [
        [middle - low for middle, (low, _) in zip(minutes, limits, strict=True)],
        [high - middle for middle, (_, high) in zip(minutes, limits, strict=True)],
    ]
    axes.errorbar(counts, minutes, yerr=errors, color=COLOURS["c0"], marker="o", markersize=4, capsize=3, label="best")
    ideal = [minutes[0] * counts[0] / count for count in counts]
    axes.plot(counts, ideal, color=COLOURS["muted"], linestyle=(0, (5, 3)), linewidth=1, label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("GPUs")
    axes.set_ylabel("minutes")
    axes.legend(loc="upper right")
    numbers = tuple(
        (str(count), str(each.layout.global_batch), minutes_of(each.seconds / 60), *map(minutes_of, limit))
        for (count, each), limit in zip(estimates.items(), limits, strict=True)
    )
    said = "; ".join(
        f"{count_of(count)} {minutes_of(value)} minutes" for count, value in zip(counts, minutes, strict=True)
    )
    return Picture(
        "times",
        "Time to train",
        f"Time to train by number of GPUs: {said}.",
        figure,
        "Bars: 90 % interval. Dashed: the time of the smallest number of GPUs, divided by the growth in GPUs.",
        ("GPUs", "batch", "minutes", "from", "to"),
        numbers,
    )


def _steps(estimates: Mapping[int, RunEstimate]) -> Picture:
    def parts(each: RunEstimate) -> dict[str, float]:
        return {PART_NAMES[name]: 1e3 * seconds for name, seconds in each.step.parts().items()}

    caption = "Each bar is one step of the best run; its length in milliseconds is on the right."
    return _stacked("steps", "Parts of a step", estimates, parts, "ms", caption)


def _energy(estimates: Mapping[int, RunEstimate]) -> Picture:
    def parts(each: RunEstimate) -> dict[str, float]:
        return {name: joules / 3.6e6 for name, joules in each.joules.items()}

    return _stacked("energy", "Energy of a run", estimates, parts, "kWh", "Idle parts are energy of GPUs that wait.")


def _stacked(
    name: str,
    title: str,
    estimates: Mapping[int, RunEstimate],
    parts: Callable[[RunEstimate], Mapping[str, float]],
    unit: str,
    caption: str,
) -> Picture:
    """Return horizontal bars of equal length, one for each number of GPUs, divided into parts."""
    values = {gpus: parts(each) for gpus, each in estimates.items()}
    named = list(dict.fromkeys(part for each in values.values() for part in each))
    named = [part for part in named if any(each.get(part) for each in values.values())]
    figure, (axes,) = new_figure(WIDTH, [0.9 + 0.45 * len(values) + 0.2 * len(named) / 2])
    for row, each in enumerate(values.values()):
        total, left = sum(each.values()), 0.0
        for part, colour in zip(named, COLOURS_OF_BARS, strict=False):
            share = each.get(part, 0.0) / total
            axes.barh(row, share, left=left, color=colour, height=0.62)
            left += share
        axes.annotate(f" {number(total)} {unit}", (1.0, row), va="center", fontsize=8.5)
    axes.set_yticks(range(len(values)), [count_of(gpus) for gpus in values])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.grid(axis="y", visible=False)
    handles: list[Any] = [axes.barh(0, 0, color=colour) for _, colour in zip(named, COLOURS_OF_BARS, strict=False)]
    axes.legend(handles, named, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    said = "; ".join(
        f"{count_of(gpus)}: " + ", ".join(f"{part} {number(each[part])} {unit}" for part in named if each.get(part))
        for gpus, each in values.items()
    )
    rows = tuple(
        (str(gpus), *(number(each.get(part, 0.0)) for part in named), number(sum(each.values())))
        for gpus, each in values.items()
    )
    return Picture(name, title, f"{title}. {said}.", figure, caption, ("GPUs", *named, f"all, {unit}"), rows)


def _samples(benchmark: str, estimates: Mapping[int, RunEstimate]) -> Picture:
    figure, (axes,) = new_figure(WIDTH, [3.0])
    points = curve_of(benchmark)
    axes.errorbar(
        [point.batch for point in points], [point.mean for point in points], yerr=[point.stdev for point in points],
        color=COLOURS["c7"], marker="o", markersize=4, capsize=3, label="reference (RCP)",
    )  # fmt: skip
    chosen = {each.layout.global_batch: each.convergence.samples for each in estimates.values()}
    axes.scatter(list(chosen), list(chosen.values()), color=COLOURS["c0"], zorder=3, label="best runs")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("global batch")
    axes.set_ylabel("samples until the target")
    axes.legend(loc="lower right")
    rows = tuple((f"{point.batch:,}", f"{point.mean:,.0f}", f"{point.stdev:,.0f}") for point in points)
    said = ", ".join(f"{point.batch}: {point.mean:,.0f}" for point in points)
    return Picture(
        "samples",
        "Samples until the target is reached",
        f"Samples of the reference by global batch: {said}.",
        figure,
        "Bars: standard deviation of one run. Between the points, samples are interpolated.",
        ("batch", "samples", "standard deviation"),
        rows,
    )


def _uncertainty(estimates: Mapping[int, RunEstimate]) -> Picture:
    named = list(dict.fromkeys(source for each in estimates.values() for source in each.uncertainty))
    figure, (axes,) = new_figure(WIDTH, [3.0])
    width = 0.8 / max(1, len(named))
    for index, (source, colour) in enumerate(zip(named, COLOURS_OF_BARS, strict=False)):
        places = [position + width * (index - (len(named) - 1) / 2) for position in range(len(estimates))]
        heights = [100 * each.uncertainty.get(source, 0.0) for each in estimates.values()]
        axes.bar(places, heights, width=0.9 * width, color=colour, label=source)
    axes.set_xticks(range(len(estimates)), [count_of(gpus) for gpus in estimates])
    axes.set_ylabel("% of the time to train")
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    rows = tuple(
        (str(gpus), *(f"{each.uncertainty.get(source, 0.0):.1%}" for source in named), f"{each.spread:.1%}")
        for gpus, each in estimates.items()
    )
    said = "; ".join(f"{count_of(gpus)} {each.spread:.1%}" for gpus, each in estimates.items())
    return Picture(
        "uncertainty",
        "Uncertainty by source",
        f"Standard deviation of the time to train: {said}.",
        figure,
        "Standard deviation of the time to train that each source causes.",
        ("GPUs", *named, "all"),
        rows,
    )


def _settings(best: Mapping[int, Plan], system: str | None) -> Html:
    """Return the card with the command of each best run, and the measurement that would help most."""
    rows = []
    for gpus, plan in best.items():
        measurement = best_measurement(plan.estimate, plan.settings.start.scale)
        command = tag("code", f"mlperf-suite train {' '.join(plan.settings.overrides(system))}")
        helps = "" if measurement is None else join(f"{measurement[0]}: ", tag("code", measurement[1]))
        rows.append((count_of(gpus), command, helps))
    head = ("", "settings", "the measurement that reduces the uncertainty most")
    return tag("section", tag("h2", "Best runs"), table(head, tuple(rows), "Settings of the best runs"), class_="card")
