"""Build the cards with runs and settings from the logs, and with the settings that differ in a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from common.mlperf.parsed_log import ParsedLog
from common.report.collect import Subject
from common.report.markup import Html, table, tag

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
        tag("h2", f"Behind {subject.name}"),
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
        else tag("p", "The logs name the same settings.", class_="note")
    )
    return tag("section", tag("h2", "What differs in the settings"), what, class_="card")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
