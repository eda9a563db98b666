"""Tables and scores of runs, compared with means computed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from closed_logs import POINT, closed_log, drawn_convergence, event
from launched import first_line_ms, log_of, write_series

from common.errors import DataError
from common.submission.summarize import main

Series = Callable[[str], Path]


def summary(paths: list[Path], tmp_path: Path, *more: str) -> tuple[int, dict]:
    file = tmp_path / "summary.json"
    code = main([*map(str, paths), "--json", str(file), *more])
    return code, json.loads(file.read_text())[0]


def test_score_is_the_olympic_mean_times_the_normalisation(tmp_path, clone, capsys):
    times = [10.0, 12.0, 11.0, 14.0, 13.0]
    results = write_series(tmp_path / "r", "resnet", clone.commit, [35.0, 35.0, 35.0, 31.0, 39.0], times.__getitem__)
    code, found = summary([results], tmp_path)
    assert code == 0
    assert found["olympic_minutes"] == pytest.approx(12.0)
    assert found["convergence"] == 35.0
    assert found["factor"] == pytest.approx(35.15384615 / 35)  # rules sheet: the RCP at 3,264 has the mean 35.154
    assert found["score_minutes"] == pytest.approx(12.0 * 35.15384615 / 35)
    assert found["reference"]["limit"] == pytest.approx(34.3096, abs=1e-3)
    assert [run["convergence"] for run in found["runs"]] == [35, 35, 35, 31, 39]
    assert found["status"] == "unverified: not verified by MLCommons Association"
    out = capsys.readouterr().out
    assert "score: 12.053 minutes, unverified: not verified by MLCommons Association" in out
    assert "declared 5, ran 5" in out


@pytest.mark.parametrize(
    ("times", "start", "score"),
    [
        # scores of the windows of 5 (the middle three of each): 2, 3, 4
        ((1.0, 1.0, 2.0, 3.0, 4.0, 4.0, 5.0), 1, 3.0),
        # the failed run is the slowest of both windows, which score 2 and 3: of two the slower is taken
        ((1.0, 1.0, None, 2.0, 3.0, 4.0), 1, 3.0),
    ],
)
def test_window_of_a_longer_series_is_the_median(tmp_path, clone, times, start, score):
    reached = [None if time is None else 39.0 for time in times]
    results = write_series(tmp_path / "r", "resnet", clone.commit, reached, lambda index: times[index] or 60.0)
    code, found = summary([results], tmp_path)
    assert [run["number"] for run in found["runs"] if run["chosen"]] == list(range(start + 1, start + 6))
    assert (code, found["score_minutes"]) == (0, pytest.approx(score))


def test_unet3d_drops_four_at_each_end(series_of, tmp_path):
    code, found = summary([series_of("unet3d")], tmp_path)
    counts = [-(-(x - 168_000) // 3360) * 3360 + 168_000 for x in drawn_convergence("unet3d")]
    assert code == 0
    assert found["convergence"] == pytest.approx(sum(sorted(counts)[4:-4]) / 32)
    assert found["olympic_minutes"] == pytest.approx(10.0 + 39 / 16)  # times 10, 10.125, ..., 14.875


def test_named_logs_are_one_set(tmp_path):
    logs = [tmp_path / f"{name}.txt" for name in "edcba"]
    for index, path in enumerate(logs):
        path.write_text(closed_log("resnet", index, 39.0, minutes=10.0 + index))
    code, found = summary(logs, tmp_path)
    assert (code, found["score_minutes"], found["declared"]) == (0, pytest.approx(12.0), None)


def test_result_files_are_ordered_by_number(tmp_path):
    for index in range(12):
        (tmp_path / f"result_{index}.txt").write_text(closed_log("bert", index))
    found = summary([tmp_path], tmp_path)[1]
    assert [run["number"] for run in found["runs"]] == list(range(12))


def numbered_logs(folder: Path, names: list[str]) -> list[Path]:
    """Logs of runs that began an hour after each other."""
    paths = [folder / name for name in names]
    for index, path in enumerate(paths):
        path.write_text(closed_log("resnet", index, 39.0, start=1_700_000_000_000 + 3_600_000 * index))
    return paths


def test_logs_out_of_launch_order_are_noted_and_cannot_be_chosen_from(tmp_path):
    six = numbered_logs(tmp_path, [f"run_{number}.log" for number in range(6)])
    assert summary(six, tmp_path)[0] == 0
    swapped = [six[1], six[0], *six[2:]]
    code, found = summary(swapped, tmp_path)
    assert (code, found["score_minutes"]) == (1, None)
    assert "run_0.log began before run_1.log: the logs are not in launch order" in found["obstacles"][0]
    code, found = summary(swapped[:5], tmp_path)  # a result without a choice does not depend on the order
    assert code == 0
    assert "not in launch order" in found["notes"][0]


@pytest.mark.parametrize(
    ("numbers", "gap"),
    [((0, 1, 2, 3, 5), 4), ((1, 2, 4, 5, 6), 3), ((2, 3, 4, 5, 6), 1)],
    ids=["fourth", "third", "first"],
)
def test_gap_in_the_numbers_is_noted_and_forbids_a_choice(tmp_path, numbers, gap):
    numbered_logs(tmp_path, [f"result_{number}.txt" for number in numbers])
    code, found = summary([tmp_path], tmp_path)
    assert code == 0
    assert f"result_{gap}.txt is missing" in found["notes"][0]
    numbered_logs(tmp_path, [f"result_{number}.txt" for number in (*numbers, 7)])
    code, found = summary([tmp_path], tmp_path)
    assert code == 1
    assert f"result_{gap}.txt is missing" in found["obstacles"][0]


@pytest.mark.parametrize("name", ["result_00.txt", "result_0 copy.txt"])
def test_result_file_that_the_package_checker_would_count_too_prevents_a_score(tmp_path, name):
    numbered_logs(tmp_path, [f"result_{number}.txt" for number in range(5)])
    (tmp_path / name).write_text((tmp_path / "result_0.txt").read_text())
    code, found = summary([tmp_path], tmp_path)
    assert code == 1
    assert name in found["obstacles"][0]


@pytest.mark.parametrize("data_set", ["stand-in", "custom"])
def test_synthetic_and_custom_data_have_no_score(data_set, results, tmp_path, capsys):
    log = log_of(results, 2)
    log.write_text(event(first_line_ms(2), POINT, "data_set", data_set) + "\n" + log.read_text())
    code, found = summary([results], tmp_path)
    assert (code, found["score_minutes"], found["status"]) == (1, None, "not an MLPerf result of any division")
    assert "no score" in capsys.readouterr().out


def test_too_few_and_too_fast_runs_have_no_score(tmp_path, clone):
    few = write_series(tmp_path / "few", "resnet", clone.commit, [35.0] * 3)
    code, found = summary([few], tmp_path)
    assert (code, found["score_minutes"]) == (1, None)
    assert any("needs 5 runs, these are 3" in text for text in found["obstacles"])
    fast = write_series(tmp_path / "fast", "resnet", clone.commit, [31.0] * 5)
    found = summary([fast], tmp_path)[1]
    assert any("converge faster than chance" in text for text in found["obstacles"])
    assert (found["convergence"], found["score_minutes"]) == (31.0, None)


def test_ruleset_that_does_not_accept_the_runs_prevents_a_score(results, tmp_path):
    code, found = summary([results], tmp_path, "--ruleset", "5.1.0")
    assert code == 1
    assert all("does not accept resnet" in text for text in found["obstacles"])


def test_older_ruleset_is_noted(results, tmp_path):
    code, found = summary([results], tmp_path, "--ruleset", "3.1.0")
    assert (code, found["ruleset"]) == (0, "3.1.0")
    assert "the runs were logged under ruleset 4.0.0 and are judged by 3.1.0" in found["notes"]


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_nothing_to_summarize_is_an_error(tmp_path, make):
    make(tmp_path / "empty")
    if (tmp_path / "empty").is_dir():
        with pytest.raises(DataError, match="has neither"):
            main([str(tmp_path / "empty")])
    else:
        assert main([str(tmp_path / "empty")]) == 1


def test_path_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        main([str(tmp_path / "absent")])
