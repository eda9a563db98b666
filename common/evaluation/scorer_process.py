"""A process of rank 0's that scores, as rank 0 sees it: what it owes, what it answers, and what ends it.

It is started before rank 0 has joined a process group or touched a GPU, since a process that has done so had better not
fork, and it never sees a GPU. After Ctrl-C or a signal to the whole job it goes on; it ends when rank 0 says so or is
gone.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from common.contract.evaluation import Predictions, Scorer
from common.errors import ConfigError, RankFailure
from common.evaluation.hand_over import pack
from common.evaluation.scorer_service import Answer, Begin, Failed, Judge, Judged, Open, Request

STARTING_SECONDS = 20 * 60.0
OPENING_SECONDS = 30 * 60.0
"""Longest that importing the scorer, and loading the ground truth, may take where ``timeout_seconds`` is less."""
LOOK_SECONDS = 1.0
"""Between two looks at a process that is waited for."""
LONGEST_LOOK_SECONDS = 5.0
"""Of the time since the last look that counts as waited: for the rest rank 0 was elsewhere, or stopped itself."""
ENDING_SECONDS = 10.0


@dataclass
class _Owed:
    """An answer that is awaited: of what, for how long at most, in seconds."""

    what: str
    limit: float


class ScorerProcess:
    """The scorer's process; a context manager, whose end is the end of the process.

    Args:
        threads: with which it scores.
        timeout_seconds: longest time for one evaluation; 0 or less for any.

    Raises:
        ConfigError: this is not Linux.
    """

    def __init__(self, threads: int, timeout_seconds: float) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError("evaluation.scoring=background: needs Linux; elsewhere choose inline")
        self._threads = threads
        self._timeout = timeout_seconds if timeout_seconds > 0 else math.inf
        self._owed: deque[_Owed] = deque()
        self._looked, self._waited = 0.0, 0.0
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
        """Its id."""
        return self._process.pid

    @property
    def owes(self) -> int:
        """Answers that are awaited."""
        return len(self._owed)

    def __enter__(self) -> ScorerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def keep_to(self, cpus: Collection[int]) -> None:
        """Let it run on these CPUs, and import what it needs; the first call of all."""
        self._send((frozenset(cpus), self._threads), "its start")

    def begin(self, scorer: Scorer) -> None:
        """Hand it the scorer; does not wait."""
        self._ask(Begin(pickle.dumps(scorer)), "its start", STARTING_SECONDS)

    def open_data(self, root: Path) -> None:
        """Have the ground truth under ``root`` loaded; does not wait."""
        self._ask(Open(root), "loading the ground truth", OPENING_SECONDS)

    def submit(self, predictions: Predictions, samples: int) -> None:
        """Have the predictions scored, of weights that have seen ``samples`` training samples.

        Waits until they are copied; whoever calls may change them afterwards.
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

    def poll(self) -> Judged | None:
        """The next score if it has come; waits for nothing. One at a time, so that no failure takes one with it.

        Raises:
            RankFailure: the process has ended, or owes an answer for too long.
            SuiteError: as it was raised there.
            RuntimeError: anything else was; the message has the traceback.
        """
        while self._owed and (answer := self._next(wait=False)) is not None:
            if isinstance(answer, Judged):
                return answer
        return None

    def wait(self) -> Judged | None:
        """Wait for the next answer, and return it if it is a score; raises as :meth:`poll` does."""
        answer = self._next(wait=True)
        return answer if isinstance(answer, Judged) else None

    def close(self) -> None:
        """End the process, whatever it does; a second call changes nothing."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: Request, what: str, least: float) -> None:
        if not self._owed:
            self._looked, self._waited = time.monotonic(), 0.0
        self._owed.append(_Owed(what, max(self._timeout, least)))
        self._send(request, what)

    def _send(self, message: object, what: str) -> None:
        try:
            self._connection.send(message)
        except ConnectionError as error:
            raise self._ended(what) from error

    def _next(self, wait: bool) -> Answer | None:
        """The answer that is owed first; None if it has not come, and nobody waits."""
        owed = self._owed[0]
        try:
            while not self._connection.poll(LOOK_SECONDS if wait else 0.0):
                self._count_wait(owed)
                if not wait:
                    return None
            answer: Answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._ended(owed.what) from error
        self._owed.popleft()
        self._looked, self._waited = time.monotonic(), 0.0
        if isinstance(answer, Failed):
            if answer.kind is None:
                raise RuntimeError(f"{owed.what} failed in the scorer of rank 0 (process {self.pid}):\n{answer.text}")
            raise answer.kind(f"{owed.what}: {answer.text}")
        return answer

    def _count_wait(self, owed: _Owed) -> None:
        """Note how long ``owed`` has been waited for."""
        now = time.monotonic()
        self._waited += min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        if self._waited > owed.limit:
            raise RankFailure(
                f"the scorer of rank 0 (process {self.pid}) is stuck: {owed.what} has taken more than "
                f"{owed.limit:g} s (timeout_seconds={self._timeout:g})"
            )

    def _ended(self, what: str) -> RankFailure:
        """The error for a process that has ended by itself."""
        try:
            code = self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            how = "has closed its connection"
        else:
            how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += "; the kernel may have run out of memory (see dmesg)"
        return RankFailure(f"the scorer of rank 0 (process {self.pid}) {how}, during: {what}")


def _environment(threads: int) -> dict[str, str]:
    """No GPU, and threads that sleep while they wait: the cores are those of rank 0."""
    own = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
    }
    return {**os.environ, **own}
