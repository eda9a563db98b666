"""Stages: tasks are done once each, in processes that end with the command, and what went wrong is one error."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from common.data.stages import Stages
from common.errors import DataError

VALUES = []


def process_of(name):
    return {"name": name, "process": os.getpid()}


def set_value():
    VALUES.append("set")


def values():
    return {"values": VALUES}


def refuse(name):
    raise DataError(f"{name} is damaged")


def test_records_come_in_the_order_of_the_tasks(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "b.json").write_text('{"name": "found"}')
    with Stages(tmp_path, 1) as stages:
        made = stages.run("s", {name: (name,) for name in "cba"}, process_of)
    assert [(name, record["name"]) for name, record in made.items()] == [("c", "c"), ("b", "found"), ("a", "a")]


def test_a_task_without_its_record_is_done_again(tmp_path):
    with Stages(tmp_path, 1) as stages:
        stages.run("s", {name: (name,) for name in "ab"}, process_of)
        stages.path("s", "a").unlink()
        called = []
        stages.run("s", {name: (name,) for name in "ab"}, lambda name: called.append(name) or {})
    assert called == ["a"]


def test_one_worker_is_this_process(tmp_path):
    with Stages(tmp_path, 1, partial(pytest.fail, "an initializer is for processes of its own")) as stages:
        made = stages.run("s", {name: (name,) for name in "ab"}, process_of)
    assert {record["process"] for record in made.values()} == {os.getpid()}


def test_an_initializer_runs_in_every_process(tmp_path):
    with Stages(tmp_path, 2, set_value) as stages:
        made = stages.run("s", dict.fromkeys("abc", ()), values)
    assert [record["values"] for record in made.values()] == [["set"]] * 3


def test_an_error_of_a_worker_process_is_raised_unchanged(tmp_path):
    with pytest.raises(DataError, match=r"^a is damaged$"), Stages(tmp_path, 2) as stages:
        stages.run("s", {"a": ("a",), "b": ("a",)}, refuse)


@pytest.mark.usefixtures("interrupting_sigint")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_worker_is_one_error(tmp_path, number):
    """Ctrl-C sends SIGINT to the workers, too. Python's handler in a worker would end them with a traceback."""
    with (
        pytest.raises(DataError, match="a process of stage s was killed, perhaps for want of memory"),
        Stages(tmp_path, 2) as stages,
    ):
        stages.run("s", {"a": (number,), "b": (number,)}, signal.raise_signal)


SECONDS = 100  # within which processes start, or end when they are killed

WORKERS = """
import os, pathlib, sys, time
from common.data.stages import Stages
def work(path):
    pathlib.Path(path + ".partial").write_text(str(os.getpid()))
    os.replace(path + ".partial", path)
    time.sleep(1000)
if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    with Stages(folder, 2) as stages:
        stages.run("s", {name: (str(folder / name),) for name in "ab"}, work)
"""


def running(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_end_when_the_command_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(WORKERS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), str(tmp_path)], env=environment)
    deadline = time.monotonic() + SECONDS
    while not all((tmp_path / name).exists() for name in "ab") and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = [int((tmp_path / name).read_text()) for name in "ab"]
    assert all(running(pid) for pid in workers)
    process.kill()
    process.wait()
    deadline = time.monotonic() + SECONDS
    while any(running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(running(pid) for pid in workers)
