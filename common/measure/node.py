"""Run measurements on the GPUs of a node, each on separate GPUs, and as many at the same time as GPUs are free."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from common.config.override import override
from common.distributed.launcher import TURN_VARIABLE
from common.errors import SuiteError
from common.measure.jobs import Job
from common.measure.table import MeasuredCopy

_ENDING_SECONDS = 10.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Copy:
    """One ``bench`` process of a measurement.

    Attributes:
        process: leader of a process group.
        places: indices of the GPUs in the node.
        report, log: output files.
    """

    process: subprocess.Popen[bytes]
    places: tuple[int, ...]
    report: Path
    log: Path


@dataclass
class _Started:
    """A measurement whose ``bench`` processes have been started.

    Attributes:
        places: indices of the GPUs reserved for the measurement.
        copies: processes that have not ended.
        turn: locked file; the processes import everything and then wait until it is unlocked.
        ends: deadline by the monotonic clock; infinite while the file is locked.
    """

    job: Job
    places: frozenset[int]
    copies: list[_Copy]
    turn: IO[bytes]
    ends: float = math.inf

    def begin(self, seconds: float) -> None:
        """Let the processes use their GPUs for at most ``seconds``."""
        fcntl.flock(self.turn, fcntl.LOCK_UN)
        self.ends = time.monotonic() + seconds

    def end(self) -> None:
        """End all processes that still run."""
        for copy in self.copies:
            _end(copy.process)
        self.turn.close()


class Node:
    """The GPUs of this node, and the measurements on them.

    Args:
        names: names of the GPUs, as in ``CUDA_VISIBLE_DEVICES``; empty if CPUs replace GPUs.
        output: folder for figures and logs.
        seconds: time limit of a measurement.
        words: function from a job to the ``bench`` arguments that follow the job's arguments.
        apart: whether to start each measurement only after the one before has ended.
    """

    def __init__(
        self,
        gpus: int,
        names: Sequence[str],
        output: Path,
        seconds: float,
        words: Callable[[Job], list[str]],
        apart: bool = False,
    ) -> None:
        self._gpus, self._names, self._output, self._seconds = gpus, names, output, seconds
        self._words, self._apart = words, apart
        self._running: list[_Started] = []
        self._next: _Started | None = None  # imports while others are measured
        self._ends = math.inf

    def measure(self, jobs: Sequence[Job], within: float = math.inf) -> Iterator[MeasuredCopy]:
        """Run the jobs and yield an outcome for each copy when it ends.

        Whenever GPUs are free, the first waiting job that fits is started. A job that needs all GPUs is started early:
        it imports while the job before it runs, and touches no GPU before its turn. A whole run has the node to itself,
        because its reader and evaluations need the CPUs. SIGTERM, or closing the iterator, ends all processes.

        Args:
            within: time limit in seconds for all jobs together. Jobs that have not started until then fail. Each gets
                what :func:`share_of` returns.

        Raises:
            ValueError: a job needs more GPUs than the node has.
        """
        for job in jobs:
            if job.taken > self._gpus:
                raise ValueError(f"{job.name} needs {job.taken} GPUs, and there are {self._gpus}")
        waiting = list(jobs)
        self._ends = time.monotonic() + within
        with _ending_by_sigterm():
            try:
                while waiting or self._running:
                    yield from self._ended()
                    if time.monotonic() > self._ends:
                        for job in waiting:
                            yield MeasuredCopy(job, None, f"not started within {within:.0f} s")
                        waiting.clear()
                    self._start_what_fits(waiting)
                    time.sleep(_POLL_SECONDS)
            finally:
                for started in [*self._running, *([] if self._next is None else [self._next])]:
                    started.end()
                self._running.clear()
                self._next = None

    def _start_what_fits(self, waiting: list[Job]) -> None:
        for job in list(waiting):
            taken = {place for running in self._running for place in running.places}
            free = [place for place in range(self._gpus) if place not in taken]
            needed = self._needed(job)
            if needed > len(free):
                continue
            waiting.remove(job)
            started, self._next = self._next, None
            if started is None or started.job != job:
                started, self._next = self._start(job, free[:needed]), started
            started.begin(min(self._seconds, share_of(job, self._ends - time.monotonic(), len(waiting))))
            self._running.append(started)
        quiet = self._apart or any(running.job.whole_run for running in self._running)
        if self._running and waiting and self._next is None and not quiet and self._needed(waiting[0]) == self._gpus:
            self._next = self._start(waiting[0], range(self._gpus))

    def _needed(self, job: Job) -> int:
        return self._gpus if self._apart or job.whole_run else job.taken

    def _start(self, job: Job, places: Sequence[int]) -> _Started:
        turn = tempfile.NamedTemporaryFile(prefix="mlperf-suite-")  # noqa: SIM115, closed when the measurement has ended
        fcntl.flock(turn, fcntl.LOCK_EX)
        started = _Started(job, frozenset(places), [], turn)
        for first in range(0, job.taken, job.gpus):
            started.copies.append(self._copy(job, tuple(places[first : first + job.gpus]), turn.name))
        return started

    def _copy(self, job: Job, places: tuple[int, ...], turn: str) -> _Copy:
        name = job.name if job.copies == 1 else f"{job.name}-gpu{places[0]}"
        report, log = self._output / f"{name}.json", self._output / f"{name}.log"
        report.unlink(missing_ok=True)
        arguments = [*job.words(), override("bench.report", report.resolve()), *self._words(job)]
        own = [self._names[place] for place in places] if self._names else []
        with open(log, "w") as file:
            process = subprocess.Popen(
                [*job.prefix, sys.executable, "-m", "common.cli", "bench", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**_environment(own, turn), **job.environment},
                start_new_session=True,
            )
        print(f"{name}: bench {shlex.join(arguments)}", flush=True)
        return _Copy(process, places, report, log)

    def _ended(self) -> Iterator[MeasuredCopy]:
        for running in list(self._running):
            late = time.monotonic() > running.ends
            for copy in list(running.copies):
                ended = copy.process.poll() is not None
                if not ended and not late:
                    continue
                if not ended:
                    _end(copy.process)
                running.copies.remove(copy)
                yield _outcome(running.job, copy, stopped=not ended)
            if not running.copies:
                running.end()
                self._running.remove(running)


def share_of(job: Job, left: float, waiting: int) -> float:
    """Return the seconds that a job may take of the time that is left for it and for the jobs that wait.

    A variant gets at most twice an equal share, so that a slow one leaves time for others. The recipe itself, with
    which all variants are compared, gets all.
    """
    return 2 * left / (waiting + 2) if job.variant else left


def _environment(gpus: Sequence[str], turn: str) -> Mapping[str, str]:
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    # Without buffering, the log of a measurement that is stopped has all that it printed.
    return {**os.environ, "PYTHONUNBUFFERED": "1", TURN_VARIABLE: turn, **visible}


def _outcome(job: Job, copy: _Copy, stopped: bool) -> MeasuredCopy:
    code, log = copy.process.returncode, copy.log
    if code == 0 and copy.report.is_file():
        return MeasuredCopy(job, json.loads(copy.report.read_text()), "", copy.places)
    if stopped:
        return MeasuredCopy(job, None, f"took too long (--seconds); {log} has its output", copy.places)
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return MeasuredCopy(job, None, f"exit code {code}: {said[-1] if said else 'no output'} ({log})", copy.places)


@contextlib.contextmanager
def _ending_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit within the context, so that ``finally`` blocks end the measurements.

    The old handler is restored even if the context fails.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a ``bench`` process and its ranks: SIGTERM first, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_ENDING_SECONDS)
            return
        except ProcessLookupError:
            process.wait()
            return
        except subprocess.TimeoutExpired:
            continue
    raise SuiteError(f"process {process.pid} of a bench does not end")
