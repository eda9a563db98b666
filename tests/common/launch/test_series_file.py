"""``runs.jsonl``: reading, writing, and the refusal of damaged or contradictory files."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from common.errors import DataError
from common.launch.series import RUNS_FILE, Begin, BeginInstance, End, append, read_runs, read_series

BEGIN = Begin(
    series="s", experiment=1, declared=2, time="2026-01-01T00:00:00+00:00", seed=7, commit="abcdef0", dirty=False,
    configuration="0" * 64, benchmark="resnet", scale="1x1", ruleset="4.0.0", log="s_1.log", output_dir="s_1", job="12",
    overrides=("benchmark=resnet",),
)  # fmt: skip
END = End("s", 1, "2026-01-01T01:00:00+00:00", 0, "success", 12.5, "valid run")


def test_entries_are_read_back(tmp_path):
    second = replace(BEGIN, experiment=2, seed=8)
    other = replace(BEGIN, series="t", declared=1)
    for entry in (BEGIN, END, second, other):
        append(tmp_path, entry)
    first, last = read_runs(tmp_path)
    assert [(run.begin, run.end) for run in first.experiments] == [(BEGIN, END), (second, None)]
    assert (first.name, first.declared, first.started) == ("s", 2, 2)
    assert first.experiments[0].log == tmp_path / "s_1.log"
    assert last.name == "t"


@pytest.mark.parametrize(
    ("entries", "complete"),
    [((END,), 0), ((replace(BEGIN, experiment=2), replace(BEGIN, experiment=3)), 1)],
    ids=["a line", "two lines"],
)
def test_partial_entries_are_removed_when_the_disk_is_full(tmp_path, entries, complete):
    append(tmp_path, BEGIN)
    limit = (tmp_path / RUNS_FILE).stat().st_size * (1 + complete) + 20
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # a write that does not fit becomes a short one
    try:
        with pytest.raises(OSError, match="No space left"):
            append(tmp_path, *entries)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [run.end for run in read_runs(tmp_path)[0].experiments] == [None]


def test_an_experiment_without_run_start_is_no_run(tmp_path):
    append(tmp_path, BEGIN)
    append(tmp_path, replace(END, status="not started", minutes=None))
    assert read_runs(tmp_path)[0].started == 0


def test_a_folder_without_the_file_has_no_series(tmp_path):
    assert read_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([BEGIN, BEGIN], "begins twice"),
        ([replace(BEGIN, experiment=2), BEGIN], "out of order"),
        ([BEGIN, replace(BEGIN, experiment=2, declared=9)], "was declared with 2"),
        ([BEGIN, BeginInstance(**asdict(replace(BEGIN, experiment=2)))], "has instances, which train together"),
        ([END], "ends without a begin"),
        ([BEGIN, END, END], "ends twice"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, entries, complaint):
    for entry in entries:
        append(tmp_path, entry)
    with pytest.raises(DataError, match=complaint) as caught:
        read_runs(tmp_path)
    assert f"line {len(entries)}" in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([BEGIN, END, END], "line 4: experiment 1 of s ends twice"),
        ([BEGIN, BEGIN], "line 3: experiment 1 of s begins twice"),
        ([END], "line 2: experiment 1 of s ends without a begin"),
    ],
)
def test_a_damaged_series_does_not_hide_the_others(tmp_path, capsys, entries, complaint):
    other = replace(BEGIN, series="t")
    for entry in (other, *entries, replace(END, series="t")):
        append(tmp_path, entry)
    (sound,) = read_runs(tmp_path)
    assert sound == read_series(tmp_path, "t")
    assert [(run.begin, run.end) for run in sound.experiments] == [(other, replace(END, series="t"))]
    assert f"{complaint}; series s is left out" in capsys.readouterr().err.replace(" or out of order", "")
    with pytest.raises(DataError, match=complaint):
        read_series(tmp_path, "s")


@pytest.mark.parametrize("line", ["{", "[]", "", json.dumps({"event": "begin"}), json.dumps({"event": "middle"})])
def test_a_damaged_line_is_named(tmp_path, line):
    append(tmp_path, BEGIN)
    with (tmp_path / RUNS_FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_runs(tmp_path)


WRONG: list[tuple[Begin | End, str, object]] = [
    (BEGIN, "series", "../s"),
    (BEGIN, "series", "-s"),
    (BEGIN, "series", ""),
    (BEGIN, "experiment", True),
    (BEGIN, "experiment", 0),
    (BEGIN, "experiment", 1.0),
    (BEGIN, "declared", 0),
    (BEGIN, "declared", "2"),
    (BEGIN, "time", "2026-01-01T00:00:00"),
    (BEGIN, "time", "yesterday"),
    (BEGIN, "time", 1767225600),
    (BEGIN, "time", "0001-01-01T00:00:00+23:59"),
    (BEGIN, "seed", 7.0),
    (BEGIN, "seed", -1),
    (BEGIN, "seed", 2**63),
    (BEGIN, "commit", "HEAD"),
    (BEGIN, "dirty", "no"),
    (BEGIN, "dirty", 0),
    (BEGIN, "configuration", "0" * 63),
    (BEGIN, "benchmark", "res net"),
    (BEGIN, "scale", "1x0"),
    (BEGIN, "scale", [1, 1]),
    (BEGIN, "ruleset", "4.0"),
    (BEGIN, "log", "/etc/passwd"),
    (BEGIN, "log", ".."),
    (BEGIN, "log", "s\n_1.log"),
    (BEGIN, "output_dir", "a/b"),
    (BEGIN, "job", 12),
    (BEGIN, "overrides", "benchmark=resnet"),
    (BEGIN, "overrides", [1]),
    (END, "exit_code", False),
    (END, "exit_code", 256),
    (END, "status", "finished"),
    (END, "status", ["success"]),
    (END, "minutes", math.nan),
    (END, "minutes", math.inf),
    (END, "minutes", True),
    (END, "minutes", "12.5"),
    (END, "verdict", None),
    (END, "reason", []),
]


@pytest.mark.parametrize(("entry", "field", "value"), WRONG, ids=[f"{field}-{value!r}" for _, field, value in WRONG])
def test_a_value_that_no_launcher_writes_is_named(tmp_path, entry, field, value):
    append(tmp_path, BEGIN)
    kind = "begin" if isinstance(entry, Begin) else "end"
    with (tmp_path / RUNS_FILE).open("a") as file:
        file.write(json.dumps({"event": kind, **asdict(entry), field: value}) + "\n")
    with pytest.raises(DataError, match=rf"runs\.jsonl, line 2: {field} is "):
        read_runs(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: fields.pop("seed"), "lacks seed"),
        (lambda fields: fields.update(colour="red"), "has 'colour', which no entry has"),
    ],
)
def test_fields_are_those_of_an_entry(tmp_path, change, words):
    fields = {"event": "begin", **asdict(BEGIN)}
    change(fields)
    (tmp_path / RUNS_FILE).write_text(json.dumps(fields) + "\n")
    with pytest.raises(DataError, match=f"line 1: {words}"):
        read_runs(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"event": "begin", "reason": "\xff"}\n', "line 1: is no UTF-8 text"),
        (b'{"event": "end", "event": "begin"}\n', "line 1: is ambiguous: it has 'event' twice"),
        (b'{"event": ' + b"[" * 100_000, "line 1: is "),
        (b'{"event": ' + b"9" * 10_000 + b"}", "line 1: is corrupt: it has an integer of 10000 digits"),
        (b"\n" + b"x" * (2**20 + 1) + b"\n", "line 2: is longer than 1 MiB"),
        (b"\n" * (2**24 + 1), "is larger than 16 MiB"),
    ],
    ids=["no text", "a key twice", "nested", "digits", "long line", "large file"],
)
def test_bytes_that_no_launcher_writes_are_one_error(tmp_path, content, words):
    (tmp_path / RUNS_FILE).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_runs(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path.with_name("elsewhere")),
    ],
    ids=["pipe", "folder", "link to a device", "link to nothing"],
)
def test_a_special_file_is_refused_without_waiting(tmp_path, make):
    make(tmp_path / RUNS_FILE)
    with pytest.raises(DataError, match=r"runs\.jsonl: is .*, no regular file"):
        read_runs(tmp_path)
