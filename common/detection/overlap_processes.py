"""Processes that compute overlaps of masks, each for a share of the pictures.

They run this module as a program, without PyTorch or a GPU. They end on request or when their parent ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from types import TracebackType
from typing import Any

from common.detection.annotations import Annotations
from common.detection.mask_overlaps import MaskColumns, MaskOverlaps, TruthMasks, joined
from common.errors import RankFailure
from common.evaluation.hand_over import pack, unpack

ENDING_SECONDS = 10.0
PR_SET_PDEATHSIG = 1


class OverlapProcesses:
    """Pool of ``count`` processes; a context manager that ends them on exit."""

    def __init__(self, count: int) -> None:
        self._processes = [_Process(share, count) for share in range(count)]

    def __enter__(self) -> OverlapProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open_truth(self, truth: Annotations) -> None:
        """Send the ground truth, with segmentations, to all processes; do not wait until they have processed it.

        Raises:
            RankFailure: a process has ended.
        """
        self._send_all(truth)

    def begin(self, found: MaskColumns, threshold: float) -> None:
        """Start to compute the overlaps of at least ``threshold``; do not wait. Raises as :meth:`open_truth`."""
        self._send_all((found, threshold))

    def end(self) -> MaskOverlaps:
        """Return the result of :meth:`begin`.

        Raises:
            RankFailure: a process has ended.
            RuntimeError: a process failed; the message has its traceback.
        """
        answers = [process.answer() for process in self._processes]  # read all, so that none is left for the next call
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(f"a process failed to find overlaps of masks:\n{answer}")
        return joined([answer for answer in answers if isinstance(answer, MaskOverlaps)])

    def close(self) -> None:
        """Kill the processes; a second call does nothing."""
        for process in self._processes:
            process.close()

    def _send_all(self, content: object) -> None:
        """Copy ``content`` once, into memory that all processes share."""
        descriptor, sizes = pack(content)
        try:
            for process in self._processes:
                process.send(descriptor, sizes)
        finally:
            os.close(descriptor)


class _Process:
    """One process, for one share of the pictures."""

    def __init__(self, share: int, shares: int) -> None:
        own_end, other_end = socket.socketpair()
        with other_end:
            arguments = [other_end.fileno(), os.getpid(), share, shares]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "common.detection.overlap_processes", *map(str, arguments)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection: Connection[Any, Any] = Connection(own_end.detach())

    def send(self, descriptor: int, sizes: list[int]) -> None:
        try:
            self._connection.send(sizes)
            send_handle(self._connection, descriptor, self._process.pid)
        except ConnectionError as error:
            raise self._ended() from error

    def answer(self) -> MaskOverlaps | str:
        """Return the overlaps, or the traceback of a failure."""
        try:
            answer: MaskOverlaps | str = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._ended() from error
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _ended(self) -> RankFailure:
        try:
            code = self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            state = "has closed its connection"
        else:
            state = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return RankFailure(f"a process that overlaps masks ({self._process.pid}) {state}")


def main(argv: Sequence[str]) -> int:
    """Receive ground truth once, then detections repeatedly, and answer each, until the connection is closed.

    Args:
        argv: descriptor of the connection, process id of the parent, index of this process's share of the pictures,
            and number of shares.

    Returns:
        The exit code.
    """
    descriptor, parent, share, shares = map(int, argv)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # works also during a computation
    if os.getppid() != parent:
        return 1
    for signum in (signal.SIGINT, signal.SIGTERM):  # schedulers signal all processes of a job; the scorer goes on
        signal.signal(signum, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        truth = TruthMasks(_received(connection), share, shares)
        while True:
            found, threshold = _received(connection)
            try:
                answer: object = truth.overlaps(found, threshold)
            except Exception:  # noqa: BLE001 - any error is sent to the scorer, which raises it
                answer = traceback.format_exc()
            connection.send(answer)
    except (EOFError, ConnectionError):
        return 0


def _received(connection: Connection[Any, Any]) -> Any:
    sizes = connection.recv()
    descriptor = recv_handle(connection)
    try:
        return unpack(descriptor, sizes)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
