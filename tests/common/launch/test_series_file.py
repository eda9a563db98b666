"""What the file of a folder's experiments remembers, and what damage to it is found."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import DataError
from common.launch.series import RUNS_FILE, Begin, End, append, read_runs

BEGIN = Begin(
    series="s", experiment=1, declared=2, time="2026-01-01T00:00:00+00:00", seed=7, commit="abc", dirty=False,
    configuration="0" * 64, benchmark="resnet", scale="1x1", ruleset="4.0.0", log="s_1.log", output_dir="s_1", job="12",
    overrides=("benchmark=resnet",),
)  # fmt: skip
END = End("s", 1, "2026-01-01T01:00:00+00:00", 0, "success", 12.5, "valid run")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    second = replace(BEGIN, experiment=2, seed=8)
    other = replace(BEGIN, series="t", declared=1)
    for entry in (BEGIN, END, second, other):
        append(tmp_path, entry)
    first, last = read_runs(tmp_path)
    assert [(run.begin, run.end) for run in first.experiments] == [(BEGIN, END), (second, None)]
    assert (first.name, first.declared, first.started) == ("s", 2, 2)
    assert first.experiments[0].log == tmp_path / "s_1.log"
    assert last.name == "t"


def test_half_a_line_is_taken_back_when_the_disk_is_full(tmp_path: Path) -> None:
    append(tmp_path, BEGIN)
    limit = (tmp_path / RUNS_FILE).stat().st_size + 20
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # a write that does not fit becomes a short one
    try:
        with pytest.raises(OSError, match="No space left"):
            append(tmp_path, END)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [run.end for run in read_runs(tmp_path)[0].experiments] == [None]


def test_an_experiment_that_never_started_the_clock_is_no_run(tmp_path: Path) -> None:
    append(tmp_path, BEGIN)
    append(tmp_path, replace(END, status="not started", minutes=None))
    assert read_runs(tmp_path)[0].started == 0


def test_a_folder_without_the_file_has_no_series(tmp_path: Path) -> None:
    assert read_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([BEGIN, BEGIN], "begins twice"),
        ([replace(BEGIN, experiment=2), BEGIN], "out of order"),
        ([BEGIN, replace(BEGIN, experiment=2, declared=9)], "was declared with 2"),
        ([END], "ends without a begin"),
        ([BEGIN, END, END], "ends twice"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, entries: list[Begin | End], complaint: str) -> None:
    for entry in entries:
        append(tmp_path, entry)
    with pytest.raises(DataError, match=complaint) as caught:
        read_runs(tmp_path)
    assert f"line {len(entries)}" in str(caught.value)


@pytest.mark.parametrize("line", ["{", "[]", json.dumps({"event": "begin"}), json.dumps({"event": "middle"})])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    append(tmp_path, BEGIN)
    with (tmp_path / RUNS_FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_runs(tmp_path)
