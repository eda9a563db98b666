"""A change of ``runs.jsonl`` or of a log after the run is a contradiction between them, and is refused."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from closed_logs import POINT, closed_log, event
from launched import (
    SERIES,
    begin_and_end,
    entries_of,
    first_line_ms,
    in_begin,
    in_entries,
    launch_time,
    log_of,
    log_text,
    seed_of,
    write_entries,
    write_series,
)

from common import cli
from common.config.composition import compose
from common.launch import experiment
from common.launch.launch_config import LaunchConfig
from common.submission import check
from common.submission.run_sets import find_run_sets
from common.submission.score import score

Change = Callable[[Path], None]
SECOND = f"{SERIES}_2.log"


def in_end(**values: object) -> Change:
    """Other values where the second experiment ends."""
    return in_entries(lambda e: e | values if (e["event"], e["experiment"]) == ("end", 2) else e)


def in_every_begin(**values: object) -> Change:
    """Other values where each experiment begins."""
    return in_entries(lambda e: e | values if e["event"] == "begin" else e)


def logged(key: str, value: object) -> Change:
    """One more event at the beginning of the second log."""

    def apply(results: Path) -> None:
        log = log_of(results, 2)
        log.write_text(event(first_line_ms(2), POINT, key, value) + "\n" + log.read_text())

    return apply


def without_seed(results: Path) -> None:
    path = results / SECOND
    path.write_text("".join(line for line in path.open() if '"key": "seed"' not in line))


def both(*changes: Change) -> Change:
    def apply(results: Path) -> None:
        for change in changes:
            change(results)

    return apply


def copied_under_a_new_seed(results: Path) -> None:
    """Replace the second log by the first one, with the seed and the times of the second."""
    text = log_of(results, 1).read_text().replace(f'"value": {seed_of(1)}', f'"value": {seed_of(2)}')
    later = first_line_ms(2) - first_line_ms(1)
    log_of(results, 2).write_text(
        re.sub(r'"time_ms": (\d+)', lambda found: f'"time_ms": {int(found[1]) + later}', text)
    )
    in_end(minutes=10.0)(results)


def renumbered(results: Path) -> None:
    """Exchange the second and the third run in name, number and seed."""
    names = [log_of(results, number) for number in (2, 3)]
    texts = [path.read_text() for path in names]
    for path, text in zip(names, reversed(texts), strict=True):
        path.write_text(text)
    ends = {e["experiment"]: e for e in entries_of(results) if e["event"] == "end"}
    in_entries(
        lambda e: (
            e | {"minutes": ends[5 - e["experiment"]]["minutes"]}
            if e["event"] == "end" and e["experiment"] in (2, 3)
            else e
        )
    )(results)


def left_by_another_series(results: Path) -> None:
    (results / "20260101-000000-000000_1.log").write_text(closed_log("resnet", 5))


def hidden(results: Path) -> None:
    """Create the output folder of a sixth experiment, without anything else of it."""
    (results / f"{SERIES}_6").mkdir()


def hard_link(results: Path) -> None:
    log_of(results, 2).unlink()
    os.link(log_of(results, 1), log_of(results, 2))


def link(results: Path) -> None:
    log = log_of(results, 2)
    log.rename(results.parent / "elsewhere")
    log.symlink_to(results.parent / "elsewhere")


def pipe(results: Path) -> None:
    log_of(results, 2).unlink()
    os.mkfifo(log_of(results, 2))


HOUR_LATER = (launch_time(2) + datetime.timedelta(hours=1)).isoformat()

CASES: dict[str, tuple[Change, str]] = {
    "minutes": (in_end(minutes=9.0), f"{SECOND}: its run took 10.12500 minutes, "),
    "minutes by 0.02 seconds": (in_end(minutes=10.125 + 0.02 / 60), f"{SECOND}: its run took"),
    "minutes away": (in_end(minutes=None), "has no time in minutes, but the status success"),
    "exit code of a miss": (in_end(exit_code=10), "has the exit code 10, which no run has that ends as success"),
    "no exit code, and no reason": (in_end(exit_code=None), "neither an exit code nor a reason"),
    "verdict": (in_end(verdict="format"), f"{SECOND}: is a valid run now, runs.jsonl says that it was of the right"),
    "verdict refused": (in_end(verdict="refused"), f"{SECOND}: is a valid run now, runs.jsonl says"),
    "verdict that no log has": (in_end(verdict="submittable"), "has the verdict 'submittable', which no log has"),
    "benchmark": (in_every_begin(benchmark="unet3d"), f"{SECOND}: is of the benchmark 'resnet', "),
    "benchmark that the ruleset does not have": (
        in_every_begin(benchmark="flux1"), "the benchmark flux1 for experiment 2, which ruleset 4.0.0 does not accept"),
    "ruleset": (logged("ruleset", "3.1.0"), f"{SECOND}: was logged under the ruleset '3.1.0', "),
    "a second seed": (logged("seed", 7), f"{SECOND}: has the seed 7, "),
    "no seed": (without_seed, f"{SECOND}: has no seed, "),
    "another seed in the file": (in_begin(2, seed=7), f"{SECOND}: has the seed {seed_of(2)}, "),
    "seeds that no launcher counts": (in_begin(2, seed=7), "experiment 2 has the seed 7, a launcher counts on"),
    "nodes": (logged("number_of_nodes", 4), f"{SECOND}: number_of_nodes is 4, "),
    "accelerators": (logged("accelerators_per_node", 4), f"{SECOND}: accelerators_per_node is 4, "),
    "earlier than its launch": (in_begin(2, time=HOUR_LATER), f"{SECOND}: cache_clear in line 2 is earlier than"),
    "later than its end": (in_end(time=launch_time(2).isoformat()), "is later than"),
    "begun before the one before was over": (
        in_begin(2, time=(launch_time(1) + datetime.timedelta(minutes=2)).isoformat()),
        "before experiment 1 was over"),
    "ended before it began": (in_end(time=launch_time(1).isoformat()), "before it began at"),
    "name of the log": (
        both(in_begin(2, log="run.log"), lambda results: log_of(results, 2).rename(results / "run.log") and None),
        "has the log run.log, a launcher calls it"),
    "name of the folder": (in_begin(2, output_dir="x"), "has the output_dir x, a launcher calls it"),
    "copied run under a new seed": (copied_under_a_new_seed, f"{SECOND} and .*_1.log are one run"),
    "renumbered": (renumbered, "the logs are not in launch order"),
    "log of a series that is not in the file": (
        left_by_another_series, "_1.log: is the log of a run, but runs.jsonl has no experiment with it"),
    "folder of an experiment that is not in the file": (hidden, f"experiment 6 of {SERIES} is missing"),
    "one file under two names": (hard_link, f"{SECOND} and .*_1.log are one file"),
    "link": (link, f"{SECOND} is a link"),
    "pipe": (pipe, f"{SECOND} is refused: is a pipe, no regular file"),
}  # fmt: skip


def obstacles(results: Path) -> list[str]:
    (run_set,) = find_run_sets([results])
    return list(score(run_set).obstacles)


@pytest.mark.parametrize("name", CASES)
def test_a_contradiction_between_registry_and_logs_is_refused(results, name):
    change, words = CASES[name]
    change(results)
    found = obstacles(results)
    assert [text for text in found if re.search(words, text)], found


@pytest.mark.parametrize(
    ("status", "changes", "words"),
    [
        ("aborted", {"exit_code": 0}, "has the exit code 0, which no run has that ends as aborted"),
        ("aborted", {"verdict": "valid run"}, "has the verdict valid run, but the status aborted"),
        ("not started", {"exit_code": 0}, "has the exit code 0, which no run has that ends as not started"),
        ("not started", {"exit_code": 10}, "has the exit code 10, which no run"),
        ("not started", {"minutes": 3.0}, "has a time in minutes, but the status not started"),
        ("not started", {"verdict": "format"}, "has the verdict format, but the status not started"),
    ],
)
def test_an_end_that_contradicts_itself_is_refused(results, clone, status, changes, words):
    begin, end = begin_and_end("resnet", "4.0.0", 6, 5, seed_of(6), clone.commit, status)
    log_of(results, 6).write_text("\n" if status == "not started" else log_text("resnet", 6, status=status))
    write_entries(results, [*entries_of(results), begin, end | changes])
    found = obstacles(results)
    assert [text for text in found if f"experiment 6 {words}" in text], found


def test_an_aborted_run_and_an_experiment_without_run_start_are_accepted(tmp_path, clone):
    results = write_series(tmp_path / "results", "resnet", clone.commit, [35.0, 35.0, None, 35.0, 35.0])
    late = begin_and_end("resnet", "4.0.0", 6, 5, seed_of(6), clone.commit, "not started")
    write_entries(results, [*entries_of(results), *late])
    log_of(results, 6).write_text("the node is down\n")
    in_entries(
        lambda e: (
            e | {"exit_code": None, "reason": "the job ended"} if e["event"] == "end" and e["experiment"] == 3 else e
        )
    )(results)
    assert obstacles(results) == []


def test_a_target_that_was_reached_before_the_machine_failed_counts(results):
    in_end(exit_code=137, reason="rank 3 was ended by a signal")(results)
    assert obstacles(results) == []


def test_clocks_of_two_machines_may_differ_by_less_than_a_minute(results):
    in_begin(2, time=(launch_time(2) + datetime.timedelta(seconds=75)).isoformat())(results)
    assert obstacles(results) == []


def test_the_registry_of_our_launcher_has_no_contradiction(tmp_path, data_of):
    data = f"data_dir={data_of('resnet')}"
    overrides = ["benchmark=resnet", "scale=test", data, f"launch.results={tmp_path}", "launch.experiments=5"]
    tree = compose(overrides)
    settings = LaunchConfig.load(tree)
    while entries := experiment.begin(tree, settings, "s", overrides, {}, cli.admitted):
        (begun,) = entries
        Path(str(begun["log"])).write_text(
            closed_log(
                "resnet", int(str(begun["seed"])), minutes=1e-3, init_seconds=0.01, start=time.time_ns() // 10**6
            )
        )
        experiment.end(settings, "s", int(str(begun["experiment"])), 0, None)
    (run_set,) = find_run_sets([tmp_path])
    found = score(run_set, "4.0.0").obstacles
    assert [text for text in found if "runs.jsonl" in text and "dirty" not in text] == []


@pytest.mark.parametrize("named", [True, False], ids=["logs by name", "folder of results"])
def test_copied_runs_are_found_without_a_registry(results, tmp_path, named, capsys):
    copied_under_a_new_seed(results)
    (tmp_path / "copies").mkdir()
    logs = [Path(shutil.copy(log_of(results, n + 1), tmp_path / "copies" / f"result_{n}.txt")) for n in range(5)]
    assert check.main([*map(str, logs)] if named else [str(tmp_path / "copies")]) == 1
    assert "result_1.txt and " in (out := capsys.readouterr().out)
    assert "are one run" in out


def test_a_copy_with_other_values_is_found_by_its_times(results):
    copied_under_a_new_seed(results)
    log = log_of(results, 2)
    log.write_text(log.read_text().replace('"value": 0.7592', '"value": 0.7594'))
    assert any("are one run" in text for text in obstacles(results))


def test_many_copies_are_found_quickly(tmp_path):
    text = closed_log("resnet", 1)
    for number in range(100):
        (tmp_path / f"result_{number}.txt").write_text(text.replace('"value": 1,', f'"value": {number + 1},'))
    (run_set,) = find_run_sets([tmp_path])
    found = score(run_set, "4.0.0").obstacles
    assert sum("are one run" in each for each in found) == 99


def test_at_most_twenty_missing_results_are_named(tmp_path):
    for number in (0, 999_999):
        (tmp_path / f"result_{number}.txt").write_text(closed_log("resnet", number))
    (run_set,) = find_run_sets([tmp_path])
    assert sum(" is missing" in text for text in run_set.gaps) == 20


def test_a_registry_of_many_series_is_read_quickly(tmp_path):
    begin = begin_and_end("resnet", "4.0.0", 1, 1, 5, "0" * 40, "success")[0]
    lines = [
        json.dumps(begin | {"series": f"s{n}", "log": f"s{n}_1.log", "output_dir": f"s{n}_1"}) for n in range(3000)
    ]
    (tmp_path / "runs.jsonl").write_text("\n".join(lines) + "\n")
    assert len(find_run_sets([tmp_path])) == 3000
