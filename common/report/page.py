"""Compose the page: result and time budget at the top, then the pictures, then runs and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.mlperf.rules import round_name
from common.mlperf.verdict import NOT_A_RESULT, UNVERIFIED
from common.report import outcomes
from common.report.budget_bars import budget_card, budget_picture
from common.report.canvas import SERIES, Picture, styled, to_svg
from common.report.collect import Subject
from common.report.headline import comparison_table, headline, title_of
from common.report.learning import learning
from common.report.lines import MANY_LINES, Line
from common.report.markup import Html, join, table, tag
from common.report.settings import differences_card, settings_card
from common.report.step_distribution import steps
from common.report.style import style_sheet
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
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        tag("title", title),
        tag("style", Html(style_sheet())),
    )
    page = tag("html", tag("head", head), tag("body", body), lang="en")
    return Document(f"<!DOCTYPE html>\n{page}\n", tuple(found))


def _lines(subjects: Sequence[Subject]) -> list[Line]:
    """Return every run with its colour: a different one per run of a small set, or per subject of a comparison."""
    if len(subjects) == 1:
        subject, runs = subjects[0], subjects[0].runs
        if len(runs) > MANY_LINES:
            return [Line(run, subject.name, SERIES[0], None) for run in runs]
        return [Line(run, subject.name, SERIES[index % len(SERIES)], run.name) for index, run in enumerate(runs)]
    return [
        Line(run, subject.name, SERIES[index % len(SERIES)], subject.name if place == 0 else None)
        for index, subject in enumerate(subjects)
        for place, run in enumerate(subject.runs)
    ]


def _draw(subjects: Sequence[Subject], lines: Sequence[Line]) -> list[tuple[str, Content]]:
    """Return heading and content of each card, in the order of the page; a sentence replaces a missing picture."""
    drawn: list[tuple[str, Content]] = []
    drawn += [("", learning(lines, "time")), ("", learning(lines, "progress"))]
    rate = throughput(lines)
    drawn.append(("Throughput", rate or "Neither metrics nor the log tell the throughput."))
    drawn.append(("Step times", steps(lines) or "There are no metrics of single steps (metrics_rank*.jsonl)."))
    sets = [subject for subject in subjects if len(subject.runs) > 1]
    drawn += [("", outcomes.times(subject, index if len(sets) > 1 else 0)) for index, subject in enumerate(sets, 1)]
    if not subjects[0].other_data:  # otherwise the banner states that nothing is compared
        drawn.append(("Convergence beside the reference (RCP)", outcomes.convergence(lines)))
        drawn.append(("Beside published results", outcomes.beside_published(subjects)))
    return drawn


def _cards(drawn: Sequence[tuple[str, Content]]) -> list[Html]:
    (_, time), (_, progress), *others = drawn
    assert isinstance(time, Picture)
    assert isinstance(progress, Picture)
    named = [(f"p{index}", content) for index, (_, content) in enumerate(others)]
    return [
        _quality_card(time, progress),
        *(_picture_card(content, name) for name, content in named if isinstance(content, Picture)),
    ]


def _not_drawn(drawn: Sequence[tuple[str, Content]]) -> Html | None:
    """Return the card that lists missing pictures and the reasons; None if there are none."""
    reasons = [(heading, content) for heading, content in drawn if isinstance(content, str)]
    if not reasons:
        return None
    items = (join(tag("dt", heading), tag("dd", reason)) for heading, reason in reasons)
    return tag("section", tag("h2", "Not drawn"), tag("dl", *items, class_="absent"), class_="card")


def _quality_card(time: Picture, progress: Picture) -> Html:
    choices = [("time", "by time", True), ("progress", f"by {progress.head[3]}", False)]
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
        tag("div", _figure(time, "qt"), class_="over-time"),
        tag("div", _figure(progress, "qp"), class_="over-progress"),
        _figures_as_table(time),
        class_="card",
    )


def _picture_card(picture: Picture, name: str) -> Html:
    return tag("section", tag("h2", picture.title), _figure(picture, name), _figures_as_table(picture), class_="card")


def _figure(picture: Picture, name: str) -> Html:
    drawing = tag("div", Html(to_svg(picture.figure, name)), class_="picture", role="img", aria_label=picture.alt)
    return tag("figure", drawing, tag("figcaption", picture.caption) if picture.caption else None)


def _figures_as_table(picture: Picture) -> Html | None:
    if not picture.rows:
        return None
    return tag(
        "details", tag("summary", "Figures as a table"), table(picture.head, picture.rows, f"{picture.title}: figures")
    )


def _top(subjects: Sequence[Subject], title: str) -> list[Html]:
    first = subjects[0]
    versions = sorted({round_name(subject.rules.ruleset) for subject in subjects})
    usage = "MLPerf HPC" if first.rules.usage == "hpc" else "MLPerf Training"
    other_data = subjects[0].other_data  # the same for all subjects, otherwise they are not comparable
    division = "of no division" if other_data else f"{first.log.division} division"
    eyebrow = f"{first.rules.benchmark} under the rules of {usage} {', '.join(versions)}, {division}"
    banner = None
    if other_data:
        kind = "Synthetic" if first.log.stand_in else "Custom"
        said = f"{kind} data: {NOT_A_RESULT}, and not compared with the reference or with published results."
        banner = tag("p", said, class_="banner", role="note")
    return [tag("p", eyebrow, class_="eyebrow"), tag("h1", title), *([banner] if banner else []), *headline(subjects)]


def _footer(subjects: Sequence[Subject]) -> list[Html]:
    said = [
        f"Times and scores of this page are {UNVERIFIED}.",
        "Made by mlperf-suite report; the page is complete in itself and loads nothing.",
    ]
    if any(run.log.resumed for subject in subjects for run in subject.runs):
        said.insert(0, "A resumed run is not scored.")
    return [tag("p", text) for text in said]
