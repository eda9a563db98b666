"""Compose the page: result and time budget at the top, then the pictures, then runs and settings of the logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from common.mlperf.parsed_log import ParsedLog
from common.mlperf.rules import round_names
from common.mlperf.verdict import NOT_A_RESULT, UNVERIFIED
from common.report import outcomes
from common.report.budget_bars import budget_card, budget_picture
from common.report.canvas import SERIES, Picture, styled
from common.report.cards import figure_element, html_page, numbers_of, picture_card
from common.report.collect import Subject
from common.report.headline import comparison_table, headline, title_of
from common.report.learning import learning
from common.report.lines import MANY_LINES, Line
from common.report.markup import Html, join, table, tag
from common.report.step_distribution import steps
from common.report.throughput import throughput

Content = Picture | str


@dataclass(frozen=True)
class Document:
    """A page and the pictures on it."""

    html: str
    pictures: tuple[Picture, ...]


def compose(subjects: Sequence[Subject]) -> Document:
    """Return the page of one run or set, or the comparison of several.

    Args:
        subjects: comparable subjects, at least one.
    """
    lines = _lines(subjects)
    drawn = styled(lambda: _draw(subjects, lines))
    found = [styled(lambda: budget_picture(lines)), *(content for _, content in drawn if isinstance(content, Picture))]
    title = title_of(subjects)
    body = join(
        tag("header", *_top(subjects, title)),
        tag(
            "main",
            comparison_table(subjects) if len(subjects) > 1 else None,
            budget_card(lines),
            tag("div", *_cards(drawn), class_="pictures"),
            _not_drawn(drawn),
            differences_card(subjects) if len(subjects) > 1 else None,
            *(settings_card(subject) for subject in subjects),
        ),
        tag("footer", *_footer(subjects)),
    )
    return Document(html_page(title, body), tuple(found))


def _lines(subjects: Sequence[Subject]) -> list[Line]:
    """Return every run with its colour: a different one per run of a small set, or per subject of a comparison."""
    if len(subjects) == 1:
        subject, runs = subjects[0], subjects[0].runs
        if len(runs) > MANY_LINES:
            return [Line(run, subject.name, SERIES[0], None) for run in runs]
        return [Line(run, subject.name, SERIES[index % len(SERIES)], run.name) for index, run in enumerate(runs)]
    return [
        Line(run, subject.name, SERIES[index % len(SERIES)], subject.name if position == 0 else None)
        for index, subject in enumerate(subjects)
        for position, run in enumerate(subject.runs)
    ]


def _draw(subjects: Sequence[Subject], lines: Sequence[Line]) -> list[tuple[str, Content]]:
    """Return heading and content of each card, in the order of the page; a sentence replaces a missing picture."""
    drawn: list[tuple[str, Content]] = []
    drawn += [("", learning(lines, "time")), ("", learning(lines, "progress"))]
    rate = throughput(lines)
    drawn.append(("Throughput", rate or "Neither the metrics nor the log contain the throughput."))
    drawn.append(("Step times", steps(lines) or "There are no step metrics (metrics_rank*.jsonl)."))
    sets = [subject for subject in subjects if len(subject.runs) > 1]
    drawn += [("", outcomes.times(subject, index if len(sets) > 1 else 0)) for index, subject in enumerate(sets, 1)]
    if not subjects[0].other_data:  # otherwise the banner states that nothing is compared
        drawn.append(("Convergence compared with the reference", outcomes.convergence(lines)))
        drawn.append(("Comparison with published results", outcomes.beside_published(subjects)))
    return drawn


def _cards(drawn: Sequence[tuple[str, Content]]) -> list[Html]:
    (_, time), (_, progress), *others = drawn
    assert isinstance(time, Picture)
    assert isinstance(progress, Picture)
    named = [(f"p{index}", content) for index, (_, content) in enumerate(others)]
    return [
        _quality_card(time, progress),
        *(picture_card(content, name) for name, content in named if isinstance(content, Picture)),
    ]


def _not_drawn(drawn: Sequence[tuple[str, Content]]) -> Html | None:
    """Return the card that lists missing pictures and the reasons; None if there are none."""
    reasons = [(heading, content) for heading, content in drawn if isinstance(content, str)]
    if not reasons:
        return None
    items = (join(tag("dt", heading), tag("dd", reason)) for heading, reason in reasons)
    return tag("section", tag("h2", "Missing pictures"), tag("dl", *items, class_="absent"), class_="card")


def _quality_card(time: Picture, progress: Picture) -> Html:
    choices = [("time", "over time", True), ("progress", f"over {progress.head[3]}", False)]
    radios = [
        tag(
            "label",
            tag("input", type="radio", name="over", class_=f"by-{name}", checked=first or None),
            label,
        )
        for name, label, first in choices
    ]
    heading = tag(
        "div", tag("h2", time.title), tag("div", *radios, class_="radios", role="group", aria_label="x axis"),
        class_="switch",
    )  # fmt: skip
    return tag(
        "section",
        heading,
        tag("div", figure_element(time, "qt"), class_="over-time"),
        tag("div", figure_element(progress, "qp"), class_="over-progress"),
        numbers_of(time),
        class_="card",
    )


def _top(subjects: Sequence[Subject], title: str) -> list[Html]:
    first = subjects[0]
    versions = round_names(subject.rules.ruleset for subject in subjects)
    usage = "MLPerf HPC" if first.rules.usage == "hpc" else "MLPerf Training"
    other_data = subjects[0].other_data  # the same for all subjects, otherwise they are not comparable
    division = "no division" if other_data else f"{first.log.division} division"
    eyebrow = f"{first.rules.benchmark} under the rules of {usage} {', '.join(versions)}, {division}"
    banner = None
    if other_data:
        kind = "Synthetic" if first.log.synthetic else "Custom"
        said = f"{kind} data: {NOT_A_RESULT}, and not compared with the reference or with published results."
        banner = tag("p", said, class_="banner", role="note")
    return [tag("p", eyebrow, class_="eyebrow"), tag("h1", title), *([banner] if banner else []), *headline(subjects)]


def _footer(subjects: Sequence[Subject]) -> list[Html]:
    said = [
        f"Times and scores on this page are {UNVERIFIED}.",
        "Written by mlperf-suite report. The page is one file and loads nothing from the network.",
    ]
    if any(run.log.resumed for subject in subjects for run in subject.runs):
        said.insert(0, "A resumed run is not scored.")
    return [tag("p", text) for text in said]


LONGEST = 160
OF_A_RUN = frozenset(
    {"seed", "cache_clear", "init_start", "init_stop", "run_start", "run_stop", "train_samples", "eval_samples"}
)
"""Log keys that are not settings, or are specific to one run of a set."""


def settings_of(log: ParsedLog) -> dict[str, str]:
    """Return the first value of each key that the log has before run_start, in the order of the log."""
    found: dict[str, str] = {}
    for event in log.events:
        if event.key == "run_start":
            break
        if event.event_type == "POINT_IN_TIME" and event.key not in OF_A_RUN and event.value is not None:
            found.setdefault(event.key, _shown(event.value))
    return found


def settings_card(subject: Subject) -> Html:
    """Return the card with the runs of a subject and, collapsed, the settings in its first log."""
    runs = tuple(
        (
            run.name,
            Html(f"{datetime.fromtimestamp(run.start, UTC):%Y-%m-%d&nbsp;%H:%M:%S&nbsp;UTC}"),
            run.status,
            f"{run.minutes:.3f}",
            ", ".join(_shown(seed) for _, _, seed in run.log.seeds) or "none",
            "not known" if not run.ranks else str(len(run.ranks)),
            run.verdict.kind,
            tag("span", run.log.path, class_="path"),
        )
        for run in subject.runs
    )
    head = ("run", "run_start", "status", "minutes", "seed", "ranks", "verdict", "log")
    settings = tuple(settings_of(subject.log).items())
    return tag(
        "section",
        tag("h2", f"Details of {subject.name}"),
        table(head, runs, "Runs"),
        *(tag("p", text, class_="note") for text in subject.left_out),
        tag("details", tag("summary", "Settings in the log"), table(("key", "value"), settings, "Settings in the log")),
        class_="card",
    )


def differences_card(subjects: Sequence[Subject]) -> Html:
    """Return the card with the settings in which the first runs of the subjects differ."""
    settings = [settings_of(subject.log) for subject in subjects]
    keys = dict.fromkeys(key for one in settings for key in one)
    rows = tuple(
        (key, *(one.get(key, "not in the log") for one in settings))
        for key in keys
        if len({one.get(key) for one in settings}) > 1
    )
    what = (
        table(("key", *(subject.name for subject in subjects)), rows, "Settings that differ")
        if rows
        else tag("p", "The logs have the same settings.", class_="note")
    )
    return tag("section", tag("h2", "Settings that differ"), what, class_="card")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
