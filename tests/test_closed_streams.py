"""Runs whose standard streams are closed, full or read only in part, and commands in a folder that was removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import cli
from tests.command_line import assert_closed_as_aborted, endless, events, launcher, training
from tests.conftest import ROOT, SECONDS
from tests.forked import Forked


@contextlib.contextmanager
def running(arguments: list[str], output: int | None, errors: Path | None) -> Iterator[Forked]:
    """Run ``mlperf-suite`` with ``output`` as standard output and ``errors`` as standard error; None is closed."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.ExitStack() as stack:
        own = [os.open(os.devnull, os.O_RDONLY)]
        if errors is not None:
            own.append(os.open(errors, os.O_WRONLY | os.O_CREAT))
        for descriptor in own:
            stack.callback(os.close, descriptor)
        streams = [own[0], output, None if errors is None else own[1]]
        process = Forked([*launcher(arguments), *arguments], ROOT, settings, streams=streams)
        stack.callback(process.kill)
        yield process


def test_a_run_with_closed_streams_trains_and_nothing_gets_into_its_files(data_of, tmp_path):
    with running(training(data_of("toy"), tmp_path / "out"), None, None) as process:
        assert process.wait(SECONDS) == 0
    lines = events(tmp_path / "out" / "mlperf.log")
    assert '"run_stop"' in lines[-1]
    assert '"status": "success"' in lines[-1]


def test_a_run_whose_output_nobody_reads_any_more_closes_its_log(data_of, tmp_path):
    reading, writing = os.pipe()
    with running(endless(data_of("toy"), tmp_path / "out"), writing, tmp_path / "errors") as process:
        os.close(writing)
        with open(reading, "rb") as lines:
            assert any(b'"run_start"' in line for line in lines)
        assert process.wait(SECONDS) == 128 + 13  # as shells report SIGPIPE
    assert_closed_as_aborted(tmp_path / "out" / "mlperf.log")
    assert "Traceback" not in (tmp_path / "errors").read_text()


@pytest.mark.parametrize("command", [["list"], ["train", "--help"]])
def test_output_that_cannot_be_written_is_one_error(command, tmp_path):
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with running(command, full, tmp_path / "errors") as process:
            assert process.wait(SECONDS) == 1
    finally:
        os.close(full)
    text = (tmp_path / "errors").read_text()
    assert text == "mlperf-suite: SuiteError: output of the command: No space left on device\n"


def test_a_log_line_that_standard_output_does_not_take_names_it(data_of, tmp_path):
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with running(training(data_of("toy"), tmp_path / "out"), full, tmp_path / "errors") as process:
            assert process.wait(SECONDS) == 1
    finally:
        os.close(full)
    text = (tmp_path / "errors").read_text()
    assert text == "mlperf-suite: SuiteError: standard output: No space left on device\n"


def test_a_command_in_a_folder_that_was_removed_is_one_error(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert cli.run(["check", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "mlperf-suite: ConfigError: the current folder no longer exists: change to another one with cd\n"
    )
