"""Build the top of the page: result, verdict and key figures of a run, or the table of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from common.mlperf.rules import round_names
from common.mlperf.verdict import UNVERIFIED, data_limit
from common.report.collect import ReportedRun, Subject
from common.report.curves import step_times
from common.report.markup import Html, duration, figure_of, join, minutes_of, number, relation, table, tag
from common.report.outcomes import placing
from common.report.throughput import mean_throughput

MOST_REASONS = 6
MOST_COLUMNS = 8  # most tiles in a row; more tiles are distributed over equally long rows
TONES = {"refused": "bad", "format": "plain", "valid run": "good", "submittable": "good", "no score": "plain"}


def title_of(subjects: Sequence[Subject]) -> str:
    """Return the title of the page: benchmark, system and result of one subject, or the names of several."""
    first = subjects[0]
    benchmark = first.rules.benchmark
    if len(subjects) > 1:
        return f"{benchmark}: {' beside '.join(subject.name for subject in subjects[:3])}" + (
            f" and {len(subjects) - 3} more" if len(subjects) > 3 else ""
        )
    where = f" on {first.system}" if first.system else ""
    return f"{benchmark}{where}: {_result_in_words(first)}"


def _result_in_words(subject: Subject) -> str:
    if subject.score is not None:
        if subject.score.minutes is not None:
            return f"score {minutes_of(subject.score.minutes)} minutes"
        return f"{len(subject.runs)} runs, no score"
    run = subject.runs[0]
    if run.verdict.kind == "refused":
        return f"{minutes_of(run.minutes)} minutes, log refused"
    return {"success": f"target reached in {minutes_of(run.minutes)} minutes", "aborted": "target not reached"}.get(
        run.status, "the log has no end"
    )


def headline(subjects: Sequence[Subject]) -> list[Html]:
    """Return result, verdict and key figures of a single subject; empty for several, which have a table instead."""
    if len(subjects) > 1:
        return []
    subject = subjects[0]
    return [_set_result(subject) if subject.score is not None else _run_result(subject), _tiles(subject)]


def _run_result(subject: Subject) -> Html:
    run = subject.runs[0]
    said = {
        "success": "Time of this run from run_start to the target, as its log says. One run is never a score.",
        "aborted": "The run ended without reaching the target.",
    }.get(run.status, "The log has no run_stop: this is the time of its last event.")
    reasons = [reason for reason in (*run.verdict.reasons, *run.verdict.notes) if reason != data_limit(run.log)]
    return _result(minutes_of(run.minutes), said, run.verdict.kind, reasons)  # the banner already states `data_limit`


def _set_result(subject: Subject) -> Html:
    score = subject.score
    assert score is not None
    if score.throughput is not None:
        return _result(
            minutes_of(score.throughput.minutes), f"Throughput: {score.throughput}.", "submittable", score.notes
        )
    if score.minutes is not None:
        said = f"Score: olympic mean {minutes_of(score.olympic_minutes or 0)} minutes x RCP factor {score.factor:.4f}; "
        return _result(minutes_of(score.minutes), said + score.choice + ".", "submittable", score.notes)
    if score.olympic_minutes is not None:
        said = f"Olympic mean, and no score: {score.choice}."
        return _result(minutes_of(score.olympic_minutes), said, "no score", score.obstacles)
    return _result(None, "There is no score.", "no score", score.obstacles)


def _result(minutes: str | None, said: str, verdict: str, reasons: Sequence[str]) -> Html:
    time = tag("p", minutes or "no score", tag("small", "minutes") if minutes else None, class_="time")
    chip = tag("span", verdict, class_=f"chip {TONES[verdict]}", title="verdict of mlperf-suite check on the log")
    more = [f"and {len(reasons) - MOST_REASONS} more"] if len(reasons) > MOST_REASONS else []
    listed = [*reasons[:MOST_REASONS], *more]
    return tag(
        "div",
        time,
        tag(
            "div",
            chip,
            tag("p", said, f" {UNVERIFIED[0].upper()}{UNVERIFIED[1:]}.", class_="said"),
            tag("ul", *(tag("li", reason) for reason in listed), class_="reasons") if listed else None,
        ),
        class_="result",
    )


def _tiles(subject: Subject) -> Html:
    figures = {**_quality(subject), **_speed(subject.runs), **_size(subject)}
    rows = math.ceil(len(figures) / MOST_COLUMNS)
    tiles = (tag("div", tag("dt", name), tag("dd", value)) for name, value in figures.items())
    return tag("dl", *tiles, class_="tiles", style=f"--columns:{math.ceil(len(figures) / rows)}")


def _quality(subject: Subject) -> dict[str, object]:
    if len(subject.runs) > 1:
        converged = sum(run.verdict.minutes is not None for run in subject.runs)
        all_runs = len(subject.score.run_set.logs) if subject.score is not None else len(subject.runs)
        times = [run.minutes for run in subject.runs]
        return {
            "reached the target": f"{converged} of {all_runs} runs",
            "fastest to slowest": _with_unit(f"{minutes_of(min(times))} to {minutes_of(max(times))}", "min"),
        }
    run = subject.runs[0]
    if run.last is None:
        return {"quality": "no evaluation"}
    last = {metric: run.quality(metric)[-1][2] for metric in run.metrics}
    value = ", ".join(f"{figure:.5g}" if len(last) == 1 else f"{name} {figure:.4g}" for name, figure in last.items())
    target = ", ".join(f"{relation(target)} {target.value:g}" for target in run.targets) or "not in the log"
    return {"last quality": value, "target": target}


def _speed(runs: Sequence[ReportedRun]) -> dict[str, object]:
    rates = [rate for run in runs if (rate := mean_throughput(run)) is not None]
    measured = [rank["step_ms"] for run in runs for rank in run.ranks]
    times = step_times(np.concatenate(measured)) if measured else None
    found: dict[str, object] = {}
    if rates:
        found["mean throughput"] = _with_unit(figure_of(float(np.mean(rates))), "samples/s")
    if times is not None:
        found["median step time"] = _with_unit(number(times.p50), "ms")
        found["step time, 99th percentile"] = _with_unit(number(times.p99), "ms")
    init = [run.budget.init for run in runs if run.budget.init is not None]
    if init:
        found["initialization (not timed)"] = duration(max(init))
    return found


def _size(subject: Subject) -> dict[str, object]:
    batch = subject.log.global_batch
    chips = subject.chips
    ranks = len(subject.runs[0].ranks)
    found: dict[str, object] = {"global batch": f"{batch:,}" if isinstance(batch, int) else "not in the log"}
    if chips:
        found["chips"] = f"{chips:,}"
    elif chips == 0:
        found["device"] = "CPU"
    if not chips and ranks:
        found["ranks"] = f"{ranks:,}"
    return found


def _with_unit(value: str, unit: str) -> Html:
    return join(value, " ", tag("small", unit))


def comparison_table(subjects: Sequence[Subject]) -> Html:
    """Return the table of a comparison: the details that MLPerf's rules require, and the key figures."""
    rows = []
    for subject in subjects:
        speed = _speed(subject.runs)
        rows.append(
            (
                subject.name,
                tag("b", _time(subject)),
                subject.system or "not named",
                *placing(subject),
                f"{len(subject.runs)}",
                *(
                    speed.get(name, "not known")
                    for name in ("mean throughput", "median step time", "step time, 99th percentile")
                ),
                subject.log.global_batch,
                _claim(subject),
            )
        )
    head = (
        "result", "minutes", "system", "version", "division", "category in the log", "chips", "runs", "throughput",
        "median step time", "step time, 99th percentile", "global batch", "status",
    )  # fmt: skip
    versions = round_names(subject.rules.ruleset for subject in subjects)
    note = f"All times are {UNVERIFIED}. One run is never a score."
    if len(versions) > 1:
        note += f" The rules of {' and '.join(versions)} set the same targets for this benchmark."
    return tag(
        "section", tag("h2", "Comparison"), table(head, tuple(rows), "Results"), tag("p", note, class_="note"),
        class_="card",
    )  # fmt: skip


def _time(subject: Subject) -> str:
    if subject.score is None:
        run = subject.runs[0]
        return (
            Html(f"{minutes_of(run.minutes)} (one&nbsp;run)")
            if run.status == "success"
            else f"target not reached ({run.status})"
        )
    if subject.score.minutes is not None:
        return f"{minutes_of(subject.score.minutes)} (score)"
    if subject.score.olympic_minutes is not None:
        return f"{minutes_of(subject.score.olympic_minutes)} (olympic mean, no score)"
    return "no score"


def _claim(subject: Subject) -> str:
    if subject.score is None:
        return f"{subject.runs[0].verdict.kind}, unverified"
    return "unverified score" if subject.score.minutes is not None else "no score"
