"""Rank 0's side of the scorer process: requests, pending answers, timeouts and errors.

The process must start before rank 0 joins a process group or uses a GPU, because forking is unsafe after that. It
never uses a GPU. It ignores Ctrl-C and signals to the whole job, and ends when rank 0 ends it or is gone.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, NamedTuple

from common.contract.evaluation import Predictions, Scorer
from common.distributed.memory_kills import MemoryKills
from common.errors import ConfigError, RankFailure
from common.evaluation.hand_over import pack
from common.evaluation.scorer_service import Answer, Failed, Judge, LoadScorer, Open, Request, ScoreAnswer

STARTING_SECONDS = 20 * 60.0
OPENING_SECONDS = 30 * 60.0
"""Lower bounds, in seconds, of the time limits for importing the scorer and for loading the ground truth."""
LOOK_SECONDS = 1.0
"""Interval between two checks of a process that rank 0 waits for, in seconds."""
LONGEST_LOOK_SECONDS = 5.0
"""Largest part of the time between two checks that counts as waiting, in seconds: rank 0 may have been stopped."""
ENDING_SECONDS = 10.0


class _Pending(NamedTuple):
    """A request whose answer has not arrived: its description, for messages, and its time limit in seconds."""

    what: str
    limit: float


class ScorerProcess:
    """The scorer process, as a context manager that ends the process.

    Args:
        timeout_seconds: longest time for one evaluation; 0 or less for no limit.

    Raises:
        ConfigError: the system is not Linux.
    """

    def __init__(self, threads: int, timeout_seconds: float) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError("evaluation.scoring=background: needs Linux; elsewhere choose inline")
        self._threads = threads
        self._timeout = timeout_seconds if timeout_seconds > 0 else math.inf
        self._pending: deque[_Pending] = deque()
        self._looked, self._waited = 0.0, 0.0
        self._memory_kills = MemoryKills()
        mine, its = socket.socketpair()
        with its:
            command = [sys.executable, "-m", "common.evaluation.scorer_main", str(its.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                env=_environment(threads),
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection: Connection[Any, Any] = Connection(mine.detach())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def pending(self) -> int:
        """Number of pending answers."""
        return len(self._pending)

    def __enter__(self) -> ScorerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def keep_to(self, cpus: Collection[int]) -> None:
        """Let the process start its imports, on these CPUs only. Must be the first call."""
        self._send((frozenset(cpus), self._threads), "its start")

    def begin(self, scorer: Scorer) -> None:
        """Send the scorer to the process; does not wait."""
        self._ask(LoadScorer(pickle.dumps(scorer)), "its start", STARTING_SECONDS)

    def open_data(self, root: Path) -> None:
        """Request loading of the ground truth under ``root``; does not wait."""
        self._ask(Open(root), "loading the ground truth", OPENING_SECONDS)

    def submit(self, predictions: Predictions, samples: int) -> None:
        """Request a score for predictions of weights that have seen ``samples`` training samples.

        Waits until the predictions are copied; the caller may change them afterwards.
        """
        descriptor, sizes = pack(predictions)
        what = f"scoring the evaluation after {samples} samples"
        try:
            self._ask(Judge(sizes), what, 0.0)
            send_handle(self._connection, descriptor, self.pid)
        except ConnectionError as error:
            raise self._ended(what) from error
        finally:
            os.close(descriptor)

    def poll(self) -> ScoreAnswer | None:
        """Return the next score if it has arrived, else None; does not wait.

        Raises:
            RankFailure: the process has ended, or an answer is overdue.
            SuiteError: the scorer raised it.
            RuntimeError: the scorer raised another error; the message contains its traceback.
        """
        while self._pending and (answer := self._next(wait=False)) is not None:
            if isinstance(answer, ScoreAnswer):
                return answer
        return None

    def wait(self) -> ScoreAnswer | None:
        """Wait for the next answer, and return it if it is a score. Raises as :meth:`poll`."""
        answer = self._next(wait=True)
        return answer if isinstance(answer, ScoreAnswer) else None

    def close(self) -> None:
        """End the process, even while it works; further calls do nothing."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: Request, what: str, least: float) -> None:
        if not self._pending:
            self._looked, self._waited = time.monotonic(), 0.0
        self._pending.append(_Pending(what, max(self._timeout, least)))
        self._send(request, what)

    def _send(self, message: object, what: str) -> None:
        try:
            self._connection.send(message)
        except ConnectionError as error:
            raise self._ended(what) from error

    def _next(self, wait: bool) -> Answer | None:
        """Return the answer to the oldest request; None if it has not arrived and ``wait`` is False."""
        request = self._pending[0]
        try:
            while not self._connection.poll(LOOK_SECONDS if wait else 0.0):
                self._count_wait(request)
                if not wait:
                    return None
            answer: Answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._ended(request.what) from error
        self._pending.popleft()
        self._looked, self._waited = time.monotonic(), 0.0
        if isinstance(answer, Failed):
            if answer.kind is None:
                raise RuntimeError(
                    f"{request.what} failed in the scorer of rank 0 (process {self.pid}):\n{answer.text}"
                )
            raise answer.kind(f"{request.what}: {answer.text}")
        return answer

    def _count_wait(self, request: _Pending) -> None:
        """Add the time since the last check to the waiting time; raise RankFailure above the limit of ``request``."""
        now = time.monotonic()
        self._waited += min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        if self._waited > request.limit:
            raise RankFailure(
                f"the scorer of rank 0 (process {self.pid}) is stuck: {request.what} has taken more than "
                f"{request.limit:g} s (timeout_seconds={self._timeout:g})"
            )

    def _ended(self, what: str) -> RankFailure:
        """Return the error for a process that has ended by itself."""
        try:
            code = self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            how = "has closed its connection"
        else:
            how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += f"; {self._memory_kills.explain()}"
        return RankFailure(f"the scorer of rank 0 (process {self.pid}) {how}, during: {what}")


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of the process: no GPU, and idle threads sleep, because rank 0 needs the cores."""
    own = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
    }
    return {**os.environ, **own}
