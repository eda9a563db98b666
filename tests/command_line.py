"""Run ``mlperf-suite`` in separate processes, and read its messages and logs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests import toy
from tests.conftest import ROOT, SECONDS, Finished
from tests.forked import Forked

Process = subprocess.Popen[str] | Forked

PROGRESS = re.compile(r"|block \d+, .*|evaluation at .*|checkpoint .*|resume=.*")
"""Lines of a healthy run on standard error."""

ENDLESS = ["benchmark.schedule.last_epoch=1000000", "benchmark.targets.mean_absolute_error.value=0"]
"""Overrides with which a run of the toy workload does not end within a test."""


def launcher(arguments: Sequence[str]) -> list[str]:
    """Return the command of the program that gets ``arguments``."""
    return [sys.executable, "-m", toy.entry(arguments)]


def training(data: Path, output: Path, *overrides: str, benchmark: str = toy.NAME) -> list[str]:
    """Return the arguments of a run of the workload's ``test`` recipe on the CPU."""
    fixed = [f"benchmark={benchmark}", "scale=test", "device=cpu", "seed=1234"]
    return ["train", *fixed, f"data_dir={data}", f"output_dir={output}", *overrides]


def ranked(module: str, ranks: int, *first: str) -> list[str]:
    """A command that starts ``ranks`` ranks of a module, with first arguments."""
    return [sys.executable, "-m", "tests.launch", module, str(ranks), *first]


def endless(data: Path, output: Path, *overrides: str) -> list[str]:
    """Return the arguments of a run of the toy workload that does not end within a test."""
    return training(data, output, *ENDLESS, *overrides)


@contextlib.contextmanager
def started(
    arguments: Sequence[str], command: Sequence[str] | None = None, file_size: int | None = None, **environment: str
) -> Iterator[Process]:
    """A process that is killed with all its descendants at the end, if it has not ended.

    One of ``python -m`` is forked, as :mod:`tests.forked` says, unless it may see a GPU: what is imported there holds
    Triton's interpreter.

    Args:
        arguments: of the command.
        command: the program and its first arguments; None for the suite's.
        file_size: bytes that a file may have before writing fails, as on a full disk.
        environment: further variables.
    """
    command = launcher(arguments) if command is None else command
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {**os.environ, **settings}
    process: Process
    if list(command[:2]) == [sys.executable, "-m"] and settings["CUDA_VISIBLE_DEVICES"] == "":
        process = Forked([*command, *arguments], ROOT, settings, file_size)
    else:
        assert file_size is None
        process = subprocess.Popen(
            [*command, *arguments], cwd=ROOT, env=settings, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    try:
        yield process
    finally:
        for left in [*descendants(process.pid), process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                left.send_signal(signal.SIGCONT)
                left.kill()
        process.communicate()


def finish(process: Process, timeout: float) -> Finished:
    """Wait for a process. Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
    output, errors = process.communicate(timeout=timeout)
    code = process.returncode
    assert code is not None
    return Finished(code, output, errors)


def descendants(pid: int) -> list[psutil.Process]:
    """Return all living descendants of ``pid``."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def rank_process(launcher: int, rank: int) -> psutil.Process:
    """Return the process of a rank. Launchers start the ranks in order, each in its own process group."""
    ranks = [child for child in psutil.Process(launcher).children() if os.getpgid(child.pid) == child.pid]
    return sorted(ranks, key=lambda child: (child.create_time(), child.pid))[rank]


def await_that(condition: Callable[[], bool], process: Process, seconds: float = SECONDS) -> None:
    """Poll until ``condition`` holds while ``process`` runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None or condition(), process.communicate()
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


def is_training(output: Path) -> Callable[[], bool]:
    """Return whether the run in ``output`` has passed its first evaluation."""
    log = output / "mlperf.log"
    return lambda: log.exists() and '"eval_stop"' in log.read_text()


def the_message(done: Finished) -> str:
    """Return the only error message on standard error; check that it has one line and that nothing else is there."""
    lines = [line for line in done.errors.splitlines() if not PROGRESS.fullmatch(line)]
    assert "Traceback" not in done.errors, done.errors
    assert len(lines) == 1, done.errors
    assert len(lines[0]) < 500, "a wall of text"
    return lines[0]


def logged(log: Path, *keys: str) -> list[dict[str, Any]]:
    """The events of a log with these keys, or all, in order."""
    found = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
    return [event for event in found if not keys or event["key"] in keys]


def official_exit_code(log: Path, ruleset: str) -> int:
    """The exit code of the command of mlperf-logging's compliance checker."""
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", ruleset, str(log)]
    out = ["--log_output", str(log.with_suffix(".out"))]
    return subprocess.run([*command, *out], capture_output=True, check=False).returncode


def events(log: Path) -> list[str]:
    """Return the events of a run's log; check that all lines are complete."""
    text = log.read_text()
    assert text.endswith("}\n")
    lines = text.splitlines()
    assert all(line.startswith(":::MLLOG {") and line.endswith("}") for line in lines)
    return lines


def assert_closed_as_aborted(log: Path) -> None:
    """Check that the last event of the log is its only ``run_stop``, with the status aborted."""
    lines = events(log)
    stops = [line for line in lines if '"run_stop"' in line]
    assert stops == [lines[-1]]
    assert '"status": "aborted"' in lines[-1]
