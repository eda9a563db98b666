"""Draw the time budget as HTML bars, whose height does not depend on the screen width, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from common.report.budget import Budget
from common.report.canvas import COLOURS, Picture, new_figure
from common.report.lines import MANY_LINES, Line
from common.report.markup import Html, duration, join, table, tag

BUDGET_COLOURS = {
    "compute": "c0",
    "compute and communication": "c0",
    "training, undivided": "c0",
    "communication": "c3",
    "data wait": "c1",
    "evaluation": "c2",
    "other": "c7",
}
NAMED_FROM = 0.11
"""Smallest fraction of the bar's length at which a part shows its name."""


def budget_card(lines: Sequence[Line]) -> Html:
    """Return the card with one bar per run, all in one scale. With several runs, each bar is labelled with its time."""
    budgets = [line.run.budget for line in lines]
    longest = max((budget.init or 0) + budget.run for budget in budgets) or 1
    many = len(lines) > 1
    bars = []
    for line, budget in zip(lines, budgets, strict=True):
        if many:
            bars.append(tag("div", _whose(line), tag("b", duration(budget.run)), class_="whose"))
        bars.append(_bar(budget, longest, many))
    return tag(
        "section",
        tag("h2", "Where the time went"),
        tag("div", *bars, class_=f"budget many{' crowd' if len(lines) > MANY_LINES else ''}") if many else bars[0],
        _legend(budgets[0]) if not many else _names(budgets),
        *(tag("p", note, class_="note") for note in dict.fromkeys(note for b in budgets for note in b.notes)),
        tag("details", tag("summary", "Numbers as a table"), _table(lines)),
        class_="card",
    )


def _whose(line: Line) -> str:
    return line.run.name if line.label is None or line.label == line.run.name else f"{line.label}: {line.run.name}"


def _bar(budget: Budget, longest: int, many: bool) -> Html:
    total = (budget.init or 0) + budget.run
    parts = []
    if budget.init:
        parts.append(_part("init", budget.init, "init", None, many or budget.init < NAMED_FROM * total))
    for name, milliseconds in budget.parts.items():
        if milliseconds > 0:
            unnamed = many or milliseconds < NAMED_FROM * total
            parts.append(_part(name, milliseconds, None, BUDGET_COLOURS[name], unnamed))
    said = "; ".join(f"{name} {duration(value)}" for name, value in budget.parts.items())
    bar = tag(
        "div", *parts, class_="bar", role="img", style=f"width:{100 * total / longest:.2f}%",
        aria_label=f"Time budget: {said}; before run_start, initialization {_init(budget)}.",
    )  # fmt: skip
    if not budget.hidden_evaluation:
        return bar
    hidden = tag(
        "div", class_="hidden", aria_hidden="true", title=f"evaluation hidden: {duration(budget.hidden_evaluation)}",
        style=f"--tone:var(--c2);background:var(--tone);margin-top:4px;"
        f"width:{100 * budget.hidden_evaluation / longest:.2f}%;margin-left:{100 * (budget.init or 0) / longest:.2f}%",
    )  # fmt: skip
    return tag("div", bar, hidden)


def _part(name: str, milliseconds: int, kind: str | None, colour: str | None, unnamed: bool) -> Html:
    tone = f";--tone:var(--{colour})" if colour else ""
    return tag(
        "span",
        None if unnamed else name,
        class_=kind,
        style=f"flex:{milliseconds} 1 0{tone}",
        title=f"{name}: {duration(milliseconds)}",
    )


def _legend(budget: Budget) -> Html:
    """Return the legend of one run: name, time and share of each part."""
    items = [
        tag(
            "li",
            _swatch(name),
            f"{name} ",
            tag("b", duration(value)),
            tag("span", f" {_share(value, budget.run)}"),
        )
        for name, value in budget.parts.items()
    ]
    if budget.hidden_evaluation:
        hidden, whole = budget.hidden_evaluation, budget.hidden_evaluation + budget.evaluation
        share = tag("span", f" {_share(hidden, whole)} of all evaluation")
        items.append(
            tag("li", _swatch("evaluation"), "evaluation during training (hidden) ", tag("b", duration(hidden)), share)
        )
    items.append(tag("li", tag("i"), "initialization, before run_start ", tag("b", _init(budget)), class_="init"))
    return tag("ul", *items, class_="legend")


def _names(budgets: Sequence[Budget]) -> Html:
    """Return the legend of several runs: name of each part, and its share of the time of all runs that have it."""
    items = []
    for name in dict.fromkeys(name for budget in budgets for name in budget.parts):
        known = [budget for budget in budgets if name in budget.parts]
        share = _share(sum(budget.parts[name] for budget in known), sum(budget.run for budget in known))
        items.append(tag("li", _swatch(name), f"{name} ", tag("span", share)))
    items.append(tag("li", tag("i"), "initialization, before run_start", class_="init"))
    return tag("ul", *items, class_="legend")


def _swatch(name: str) -> Html:
    return tag("i", style=f"--tone:var(--{BUDGET_COLOURS[name]})")


def _table(lines: Sequence[Line]) -> Html:
    names = list(dict.fromkeys(name for line in lines for name in line.run.budget.parts))
    rows = []
    for line in lines:
        budget = line.run.budget
        cells = [_cell(budget.parts.get(name), budget.run) for name in names]
        hidden = duration(budget.hidden_evaluation)
        rows.append((_whose(line), _init(budget), *cells, hidden, duration(budget.run)))
    head = ("run", "initialization (not timed)", *names, "evaluation during training (hidden)", "run")
    return table(head, tuple(rows), "Time budget of each run")


def _cell(milliseconds: int | None, run: int) -> Html | str:
    return "not known" if milliseconds is None else join(duration(milliseconds), f" ({_share(milliseconds, run)})")


def _share(milliseconds: int, run: int) -> str:
    return f"{milliseconds / run:.1%}" if run else "0 %"


def _init(budget: Budget) -> str:
    return "not in the log" if budget.init is None else duration(budget.init)


def budget_picture(lines: Sequence[Line]) -> Picture:
    """Return the time budgets as a bar chart for ``--png``; the page uses :func:`budget_card` instead."""
    figure, (axes,) = new_figure(9.0, [0.9 + 0.42 * len(lines)])
    named: dict[str, str] = {}
    for row, line in enumerate(lines):
        left = 0.0
        for name, milliseconds in line.run.budget.parts.items():
            colour = COLOURS[BUDGET_COLOURS[name]]
            axes.barh(row, milliseconds / 60_000, left=left, color=colour, height=0.62)
            left += milliseconds / 60_000
            named.setdefault(name, colour)
    axes.set_yticks(range(len(lines)), [line.run.name for line in lines])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_xlabel("minutes since run_start, by activity")
    handles = [axes.barh(0, 0, color=colour) for colour in named.values()]
    axes.legend(handles, list(named), ncols=len(named), loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    spent = "; ".join(
        f"{line.run.name}: " + ", ".join(f"{name} {duration(ms)}" for name, ms in line.run.budget.parts.items())
        for line in lines
    )
    return Picture("time_budget", "Time budget", f"Bars of the time that each run spent. {spent}.", figure)
