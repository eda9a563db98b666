"""Reading logs: what follows from the events, and errors that name the line."""

import bz2
import gzip
import lzma
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from handwritten_logs import POINT, START, encode, resnet_lines

from common.errors import DataError
from common.mlperf.parsed_log import read_log

WriteLog = Callable[..., Path]


def test_facts_of_a_run(write_log):
    log = read_log(write_log(resnet_lines(seed=77, accuracies=(0.1, 0.5, 0.76), last_epoch=11, minutes=12.5)))
    assert log.benchmark == "resnet"
    assert log.division == "closed"
    assert log.global_batch == 3264
    assert log.status == "success"
    assert log.run_minutes == 12.5
    assert log.init_minutes == pytest.approx(59 / 60)
    assert [(e.progress, e.progress_key, e.values) for e in log.evaluations] == [
        (3, "epoch_num", {"eval_accuracy": 0.1}),
        (7, "epoch_num", {"eval_accuracy": 0.5}),
        (11, "epoch_num", {"eval_accuracy": 0.76}),
    ]
    assert [seed for _, _, seed in log.seeds] == [77]
    assert not log.synthetic
    assert not log.resumed


def test_several_metrics_and_units(write_log):
    lines = [
        (POINT, "eval_accuracy", {"BBOX": 0.377, "SEGM": 0.34}, {"epoch_num": 13}, 0),
        (POINT, "eval_accuracy", 85.5, {"metric": "FID", "samples_count": 512000}, 0),
        (POINT, "eval_error", 0.12, {"epoch_num": 4}, 0),
        (POINT, "eval_accuracy", None, {"epoch_num": 4}, 0),
        (POINT, "eval_accuracy", 0.5, {}, 0),
    ]
    evaluations = read_log(write_log(lines)).evaluations
    assert [e.values for e in evaluations] == [
        {"BBOX": 0.377, "SEGM": 0.34},
        {"FID": 85.5},
        {"eval_error": 0.12},
        {"eval_accuracy": 0.5},
    ]
    assert [e.progress for e in evaluations[:3]] == [13, 512000, 4]
    assert math.isnan(evaluations[3].progress)


def test_prefixes_other_output_and_carriage_returns_are_ignored(tmp_path):
    seed, stats = encode((POINT, "seed", 1, {}, 0), 1), encode((POINT, "tracked_stats", 2, {}, 0), 2)
    path = tmp_path / "log"
    path.write_bytes(b"hello \xff\n" + b"0: " + seed.encode() + b"50%|####\r" + stats.encode() + b":::MLLOG" + b"x\n")
    assert [(event.key, event.line) for event in read_log(path).events] == [("seed", 2), ("tracked_stats", 4)]


def test_an_event_that_several_ranks_write_counts_once(tmp_path):
    """The compliance checker only warns about repeated lines; the seed checker refuses a repeated seed."""
    lines = [(START, "run_start", None, {}, 0), (POINT, "seed", 1, {}, 0.1), (POINT, "eval_accuracy", 0.1, {}, 0.2)]
    later = [(*line[:4], line[4] + 0.7) for line in lines]
    restarted = (START, "run_start", None, {}, 90)
    (tmp_path / "log").write_text("".join(encode(line, 1) for line in [*lines, *later, restarted]))
    log = read_log(tmp_path / "log")
    assert [(event.key, event.line) for event in log.events] == [
        ("run_start", 1), ("seed", 2), ("eval_accuracy", 3), ("seed", 5), ("run_start", 7),
    ]  # fmt: skip
    assert [event.line for event in log.echoes] == [4, 6]


@pytest.mark.parametrize(
    ("before", "after"),
    [('"metadata": {}', '"metadata": null'), ('"time_ms": 5', '"time_ms": "5"'), ('"event_type": "", ', "")],
)
def test_forms_that_the_checkers_read_are_read(tmp_path, before, after):
    line = ':::MLLOG {"time_ms": 5, "event_type": "", "key": "a", "value": 1, "metadata": {}}\n'
    (tmp_path / "log").write_text(line.replace(before, after))
    (event,) = read_log(tmp_path / "log").events
    assert (event.time_ms, event.key, event.value, event.metadata) == (5.0, "a", 1, {})


@pytest.mark.parametrize(("logged", "seed"), [("7", 7), (7.0, 7), ("7.5", "7.5"), (7.5, 7.5), (True, True)])
def test_a_seed_is_the_integer_that_the_seed_checker_reads(write_log, logged, seed):
    ((_, _, value),) = read_log(write_log([(POINT, "seed", logged, {}, 0)])).seeds
    assert (value, type(value)) == (seed, type(seed))


@pytest.mark.parametrize("begun", [':::MLLOG {"namesp', ':::MLLOG {"key": 1}', ":::MLL", ":::"])
def test_event_that_begins_within_another_is_refused(tmp_path, begun):
    path = tmp_path / "log"
    path.write_text("0: " + begun + encode((POINT, "seed", 1, {}, 0), 1) + 'ace": ""}\n')
    with pytest.raises(DataError, match="line 1: one MLLOG event begins within another"):
        read_log(path)


BAD_LINES = {
    "cut within the object": (':::MLLOG {"namespace": "", "time_ms": 17000', "truncated or corrupt"),
    "cut within the token": (":::MLL", "truncated"),
    "a list": (":::MLLOG [1, 2]\n", "not a JSON object"),
    "no time": (':::MLLOG {"event_type": "", "key": "a", "value": 1, "metadata": {}}\n', "lacks time_ms"),
    "no metadata": (':::MLLOG {"time_ms": 1, "event_type": "", "key": "a", "value": 1}\n', "lacks metadata"),
    "metadata a list": (
        ':::MLLOG {"time_ms": 1, "event_type": "", "key": "a", "value": 1, "metadata": []}\n',
        "an object or null as metadata",
    ),
    "time a word": (
        ':::MLLOG {"time_ms": "now", "event_type": "", "key": "a", "value": 1, "metadata": {}}\n',
        "time_ms is not a number",
    ),
    "time NaN": (
        ':::MLLOG {"time_ms": NaN, "event_type": "", "key": "a", "value": 1, "metadata": {}}\n',
        "time_ms is not a number",
    ),
    "time true": (
        ':::MLLOG {"time_ms": true, "event_type": "", "key": "a", "value": 1, "metadata": {}}\n',
        "time_ms is not a number",
    ),
    "time beyond a float": (
        ':::MLLOG {"time_ms": 1%s, "event_type": "", "key": "a", "value": 1, "metadata": {}}\n' % ("0" * 400),
        "integer of 401 digits",
    ),
    "brackets without end": (":::MLLOG " + "[" * 100_000 + "\n", "more than 20000 entries"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_is_named(tmp_path, name):
    text, message = BAD_LINES[name]
    path = tmp_path / "log"
    path.write_text(encode((POINT, "seed", 1, {}, 0), 1) + "\n" + text)
    with pytest.raises(DataError, match=message) as caught:
        read_log(path)
    assert "line 3" in str(caught.value) or "last line" in str(caught.value)


def test_file_without_a_log_is_an_error(tmp_path):
    (tmp_path / "log").write_text("nothing here\n")
    with pytest.raises(DataError, match="no MLLOG line"):
        read_log(tmp_path / "log")
    with pytest.raises(DataError, match="cannot be read"):
        read_log(tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (gzip.compress(b"a log", mtime=0), "is compressed; unpack it"),
        (lzma.compress(b"a log"), "is compressed; unpack it"),
        (bz2.compress(b"a log"), "is compressed; unpack it"),
        (":::MLLOG {}".encode("utf-16"), "is UTF-16 text"),
    ],
    ids=["empty", "gzip", "xz", "bzip2", "UTF-16"],
)
def test_the_message_describes_a_file_that_is_no_log(tmp_path, content, reason):
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read_log(tmp_path / "log")


def test_folder_and_pipe_are_no_logs(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is a folder"):
        read_log(tmp_path)
    with pytest.raises(DataError, match="is a pipe, no regular file"):
        read_log(tmp_path / "pipe")
