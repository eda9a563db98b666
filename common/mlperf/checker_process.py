"""Access to MLCommons' compliance and RCP checkers, which read untrusted logs in a sandboxed process.

Within :func:`one_checker_process`, one process answers all requests; outside, each request starts its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from common.errors import SuiteError
from common.mlperf.parsed_log import ParsedLog
from common.untrusted.confined import command, environment

SECONDS = 60.0
"""CPU time limit of one request, in seconds. Time in which a loaded machine does not run the process is not counted."""
WAITING_SECONDS = 3600.0
"""Time limit of one request including the time in which the process does not run, in seconds."""
CPU_SECONDS = 3600
"""CPU time limit of one process, in seconds."""
_ERRORS = "stderr"


class CheckerStopped(SuiteError):
    """The checker gave no answer, because it could not start, reached a time or memory limit, or crashed."""


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds; 0 if it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock of another process, as clock_getcpuclockid of libc
    except OSError:
        return 0.0


def _stop_late(process: subprocess.Popen[str], answered: threading.Event, timed_out: threading.Event) -> None:
    """Kill a process that reaches a time limit before it has answered."""
    used, begun = _cpu_seconds(process.pid), time.monotonic()
    while _cpu_seconds(process.pid) - used < SECONDS and time.monotonic() - begun < WAITING_SECONDS:
        if answered.wait(1.0):
            return
    timed_out.set()
    process.kill()


class CheckerProcess:
    """A process of :mod:`common.mlperf.checker_worker`. The first request starts it."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, task: str, logs: Sequence[ParsedLog] = (), **values: object) -> Any:
        """Return the worker's answer to one task; only one thread at a time sends a request.

        If a process that was already running fails, the request is repeated once in a new process.

        Args:
            values: further entries of the request, from trusted sources only.

        Raises:
            CheckerStopped: the worker gave no answer.
        """
        with self._lock:
            known = self._process is not None
            try:
                return self._ask(task, logs, values)
            except CheckerStopped:
                if not known:
                    raise
            return self._ask(task, logs, values)  # an earlier request or the machine may be the cause

    def _ask(self, task: str, logs: Sequence[ParsedLog], values: Mapping[str, object]) -> Any:
        request = {"task": task, "lines": [len(log.events) for log in logs], **values}
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        answered, timed_out = threading.Event(), threading.Event()
        watch = threading.Thread(target=_stop_late, args=(process, answered, timed_out), daemon=True)
        watch.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            for log in logs:
                for event in log.events:
                    process.stdin.write(event.text + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:  # an unread answer would be taken for the answer to the next request
            self._end()
            raise
        finally:
            answered.set()
            watch.join()
        if not answer.endswith("\n"):
            error = self._end()
            late = f"it gave no answer in {SECONDS:g} s of CPU time"
            why = late if timed_out.is_set() else "it died, or ran out of memory"
            raise CheckerStopped(f"{why}: {error}" if error else why)
        content = json.loads(answer)
        if "stopped" in content:
            self._end()
            raise CheckerStopped(content["stopped"])
        return content["answer"]

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            try:
                if self._folder is None:
                    self._folder = tempfile.TemporaryDirectory(prefix="mlperf-checker-")
                folder = self._folder.name
                start = command("common.mlperf.checker_worker", (), folder=folder, readable=(), cpu_seconds=CPU_SECONDS)
                with Path(folder, _ERRORS).open("wb") as errors:
                    self._process = subprocess.Popen(
                        start, cwd=folder, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        stderr=errors, encoding="utf-8",
                    )  # fmt: skip
            except OSError as error:
                raise CheckerStopped(f"it cannot be started: {error.strerror}") from error
        return self._process

    def _end(self) -> str:
        """End the process; return the last line of its standard error."""
        process, self._process = self._process, None
        if process is None or self._folder is None:
            return ""
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.communicate()
        with contextlib.suppress(OSError), Path(self._folder.name, _ERRORS).open(errors="replace") as errors:
            return (errors.read(10_000).strip().splitlines() or [""])[-1][:200]
        return ""

    def close(self) -> None:
        """End the process and remove its folder."""
        self._end()
        if self._folder is not None:
            self._folder.cleanup()


_current: ContextVar[tuple[int, CheckerProcess] | None] = ContextVar("checker_process", default=None)


@contextlib.contextmanager
def one_checker_process() -> Iterator[CheckerProcess]:
    """Provide one process for all requests in this context. A nested context reuses the process of the outer one.

    The outermost context ends the process, even if it fails.
    """
    known = _current.get()
    if known is not None and known[0] == os.getpid():
        yield known[1]
        return
    process = CheckerProcess()
    token = _current.set((os.getpid(), process))
    try:
        yield process
    finally:
        _current.reset(token)
        process.close()
