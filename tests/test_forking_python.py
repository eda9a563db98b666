"""Test that the program that replaces Python in tests of scripts behaves as Python."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from tests.forking_python import forking_python

INTERPRETER = ["-m", "code", "-q"]
"""Standard module that executes the lines of standard input."""


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    with forking_python() as program:
        yield program


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def test_streams_folder_and_environment_are_those_of_the_caller(python, environment, tmp_path):
    text = "import os\nprint('at', os.getcwd(), os.environ['WORD'])\n_ = os.write(2, b'an error')\n"
    done = subprocess.run(
        [python, *INTERPRETER], cwd=tmp_path, env={**environment, "WORD": "a 'quoted'\nword"},
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"at {tmp_path} a 'quoted'\nword\n" in done.stdout
    assert "an error" in done.stderr


def test_arguments_and_the_exit_code_are_handed_on(python, environment):
    done = subprocess.run(
        [python, "-m", "common.cli", "no such command"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no command 'no such command'" in done.stderr


@contextlib.contextmanager
def waiting(python: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that executes lines, and has executed one."""
    command = [python, *INTERPRETER]
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, stderr=DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"print('here')\n")
        process.stdin.flush()
        while b"here" not in process.stdout.readline():
            assert process.poll() is None
        yield process
        process.stdout.read()  # until the forked process, which has it open too, has ended


def test_a_signal_ends_the_process_and_the_caller_sees_it(python, environment):
    with waiting(python, environment) as process:
        process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_a_process_whose_caller_is_killed_does_not_go_on(python, environment):
    with waiting(python, environment) as process:
        process.kill()  # the context ends only when the forked process has
    assert process.wait() == -signal.SIGKILL


def test_without_the_one_that_forks_there_is_a_message(environment):
    with forking_python() as program:
        client = program.read_text().replace("/socket'", "/nowhere'").replace("/socket ", "/nowhere ")
        done = subprocess.run(["sh", "-c", client], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No such file" in done.stderr
