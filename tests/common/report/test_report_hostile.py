"""`report` of runs whose files anybody may have written: one message or a page, within bounds, and no hang."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from common.errors import DataError
from common.report import command
from common.report.collect import gather
from common.report.page import compose
from tests.common.report.report_runs import before_the_clock, resnet_run, write_log, write_metrics, write_series
from tests.common.untrusted.hostile import complaints

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
METRICS = "metrics_rank0.jsonl"
TIME = '{"time": 1700000010.0, "loss": %s}\n'

LINES = {
    "a line of 100 MB": '{"time": 1700000010.0, "a": "' + "x" * 100_000_000 + '"}\n',
    "100 MB without an end": "x" * 100_000_000,
    "a line of 60,000 digits": TIME % ("7" * 60_000),
    "nested 30,000 deep": TIME % ("[" * 30_000 + "]" * 30_000),
    "1 million lists": "[]\n" * 1_000_000,
    "a torn line": '{"time": 17\n',
    "4 million steps": '{"time":17e8}\n' * 4_000_000,
    "null bytes": "\0" * 1000 + "\n",
}


def run_folder(folder: Path, metrics: str | None = None) -> Path:
    """The output_dir of a run."""
    write_log(folder / "mlperf.log", resnet_run(epochs=5))
    if metrics is None:
        write_metrics(folder, 0, 20, 1.0)
    else:
        (folder / METRICS).write_text(metrics)
    return folder


def report(path: Path) -> None:
    """Write the report of an output_dir."""
    command.main([str(path)])


@pytest.mark.slow
def test_hostile_metrics_cost_little_and_end_in_a_message(tmp_path):
    valid = run_folder(tmp_path / "valid")
    folders = {
        name: run_folder(tmp_path / f"hostile{number}", text) for number, (name, text) in enumerate(LINES.items())
    }
    for name, link in (("device", True), ("pipe", False)):
        folders[name] = run_folder(tmp_path / name)
        (folders[name] / METRICS).unlink()
        if link:
            (folders[name] / METRICS).symlink_to("/dev/zero")
        else:
            os.mkfifo(folders[name] / METRICS)
    wrong = complaints("tests.common.report.test_report_hostile:report", valid, folders)
    assert wrong == []
    assert [path.name for path in tmp_path.rglob("*.html")] == ["valid_report.html"]
    for folder in folders.values():
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_log_that_is_no_file_is_one_error(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    if kind == "pipe":
        os.mkfifo(folder / "mlperf.log")
    else:
        (folder / "mlperf.log").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"mlperf\.log"):
        report(folder)


MORE_NUMBERS = ("1e400", "-1e400", "1e308", "true", '"1"', "[]", "1e-320")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param("1" + "0" * 400, id="10**400"),
        pytest.param("NaN", id="NaN"),
        pytest.param("-1e308", id="-1e308"),
        pytest.param("null", id="null"),
        *(pytest.param(text, id=f"as {text}", marks=pytest.mark.slow) for text in MORE_NUMBERS),
    ],
)
def test_numbers_of_any_size_make_a_page(tmp_path, number):
    line = '{"time": %s, "samples": %s, "loss": %s, "step_ms": %s, "data_wait_ms": %s, "power_w": %s}\n'
    lines = [line % ("1700000010.0", *[number] * 5), line % (number, 1, 1, 1, 1, 1)]
    metrics = "".join(lines) if len(number) < 30 else lines[0].replace(number, "9" * 20)
    page = compose(gather([run_folder(tmp_path / "run", metrics)])).html
    assert not CONTROL.search(page)


HIDDEN = "a\0b\x1b[2J\r\x85c\u202ed\u200be\ud800</script><b>"


def test_control_characters_are_written_as_escapes(tmp_path):
    before = {"submission_platform": HIDDEN, "submission_org": HIDDEN}
    lines = resnet_run(epochs=5, **before)
    lines.insert(3, ("POINT_IN_TIME", HIDDEN, HIDDEN, {}, -57))
    lines = [
        (kind, key, {HIDDEN: 0.5} if key == "eval_accuracy" else value, *rest) for kind, key, value, *rest in lines
    ]
    folder = tmp_path / "a\x1b[2Jb\u202ec"
    write_log(folder / "mlperf.log", lines)
    page = compose(gather([folder])).html
    assert not CONTROL.search(page)
    assert "\\x1b[2J" in page
    assert "</script>" not in page


def test_long_values_are_cut(tmp_path):
    folder = tmp_path / "run"
    plain = compose(gather([run_folder(folder)])).html
    long = "x" * 500_000
    write_log(folder / "mlperf.log", resnet_run(epochs=5, submission_platform=long, submission_org=long))
    assert len(compose(gather([folder])).html) < len(plain) + 50_000


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"nodes": 3}', '{"nodes": {"a": {}}}', "[" * 200_000, '{"nodes": 1, "nodes": 2}'],
    ids=["empty", "list", "number", "no facts", "nested", "twice"],
)
def test_a_damaged_report_of_doctor_is_one_error(tmp_path, text):
    folder = write_series(tmp_path / "series", [5], [70.0])
    (folder / "20260101-000000_doctor.json").write_text(text)
    with pytest.raises(DataError, match="doctor"):
        gather([folder])


def test_a_run_before_its_clock_is_one_error(tmp_path):
    write_log(tmp_path / "mlperf.log", before_the_clock()[:-1])
    with pytest.raises(DataError, match="run_start"):
        report(tmp_path)
