"""Runs measurements on the GPUs of a node: each on its own, as many beside each other as there is room for."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from common.config.override import override
from common.errors import SuiteError
from common.measure.jobs import Job
from common.measure.table import Outcome

_ENDING_SECONDS = 10.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Running:
    """A measurement that goes on.

    Attributes:
        job: the measurement.
        process: its bench, which leads a process group.
        places: GPUs that nothing else may use.
        report, log: its files.
        ends: when it counts as failed, by the monotonic clock.
    """

    job: Job
    process: subprocess.Popen[bytes]
    places: frozenset[int]
    report: Path
    log: Path
    ends: float


class Node:
    """The GPUs of this node, and the measurements on them.

    Args:
        gpus: how many.
        names: of them, as ``CUDA_VISIBLE_DEVICES`` has them; empty where processors stand in for GPUs.
        output: folder of figures and logs.
        seconds: that a measurement may take.
        words: of every bench, behind those of its job.
        apart: one measurement after the other.
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
        self._running: list[_Running] = []

    def measure(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """What becomes of each, as they end.

        The first in order that fits is started wherever GPUs are free. Readers and evaluations need the node's
        processors: nothing runs beside a whole run. Whoever stops asking, or SIGTERM, ends all that runs.

        Raises:
            ValueError: a job needs more GPUs than there are.
        """
        for job in jobs:
            if job.gpus > self._gpus:
                raise ValueError(f"{job.name} needs {job.gpus} GPUs, and there are {self._gpus}")
        waiting = list(jobs)
        with _ending_by_sigterm():
            try:
                while waiting or self._running:
                    yield from self._ended()
                    self._start_what_fits(waiting)
                    time.sleep(_POLL_SECONDS)
            finally:
                for running in self._running:
                    _end(running.process)
                self._running.clear()

    def _start_what_fits(self, waiting: list[Job]) -> None:
        for job in list(waiting):
            taken = {place for running in self._running for place in running.places}
            free = [place for place in range(self._gpus) if place not in taken]
            needed = self._gpus if self._apart or job.whole_run else job.gpus
            if needed > len(free):
                continue
            waiting.remove(job)
            self._running.append(self._start(job, free[:needed]))

    def _start(self, job: Job, places: Sequence[int]) -> _Running:
        report, log = self._output / f"{job.name}.json", self._output / f"{job.name}.log"
        report.unlink(missing_ok=True)
        told = [*job.words(), override("bench.report", report.resolve()), *self._words(job)]
        own = [self._names[place] for place in places[: job.gpus]] if self._names else []
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "common.cli", "bench", *told],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_environment(own),
                start_new_session=True,
            )
        print(f"{job.name}: bench {shlex.join(told)}", flush=True)
        return _Running(job, process, frozenset(places), report, log, time.monotonic() + self._seconds)

    def _ended(self) -> Iterator[Outcome]:
        for running in list(self._running):
            late = time.monotonic() > running.ends
            if running.process.poll() is None and not late:
                continue
            if running.process.poll() is None:
                _end(running.process)
            self._running.remove(running)
            yield _outcome(running, late)


def _environment(gpus: Sequence[str]) -> Mapping[str, str]:
    return {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}


def _outcome(running: _Running, late: bool) -> Outcome:
    job, code, log = running.job, running.process.returncode, running.log
    if code == 0 and running.report.is_file():
        return Outcome(job, json.loads(running.report.read_text()))
    if late:
        return Outcome(job, None, f"took too long (--seconds); {log} has its output")
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(job, None, f"exit code {code}: {said[-1] if said else 'no output'} ({log})")


@contextlib.contextmanager
def _ending_by_sigterm() -> Iterator[None]:
    """Within it SIGTERM is an exit like others, on the way of which measurements are ended."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another must not stop what ends them
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a bench and its ranks."""
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
