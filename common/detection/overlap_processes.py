"""Processes among which the overlaps of masks are dealt out, picture by picture, as whoever scores sees them.

They are programs of their own, without PyTorch or a GPU, which end when they are told to or when whoever started them
is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from types import TracebackType
from typing import Any

from common.detection.annotations import Annotations
from common.detection.mask_overlaps import MaskColumns, MaskOverlaps, joined
from common.errors import RankFailure
from common.evaluation.hand_over import pack

ENDING_SECONDS = 10.0


class OverlapProcesses:
    """``count`` processes; a context manager, whose end is theirs."""

    def __init__(self, count: int) -> None:
        self._processes = [_Process(share, count) for share in range(count)]

    def __enter__(self) -> OverlapProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open_truth(self, truth: Annotations) -> None:
        """Hand them the ground truth, with segmentations; does not wait until they have prepared it.

        Raises:
            RankFailure: one has ended.
        """
        self._tell_all(truth)

    def begin(self, found: MaskColumns, threshold: float) -> None:
        """Have the overlaps of ``threshold`` and above found; does not wait. Raises as :meth:`open_truth`."""
        self._tell_all((found, threshold))

    def end(self) -> MaskOverlaps:
        """What :meth:`begin` asked for.

        Raises:
            RankFailure: one has ended.
            RuntimeError: one could not do it; the message has its traceback.
        """
        answers = [process.answer() for process in self._processes]  # all, so that none is left for the next time
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(f"a process failed to find overlaps of masks:\n{answer}")
        return joined([answer for answer in answers if isinstance(answer, MaskOverlaps)])

    def close(self) -> None:
        """End them, whatever they do; a second call changes nothing."""
        for process in self._processes:
            process.close()

    def _tell_all(self, content: object) -> None:
        """Copy ``content`` once, into memory that all of them see."""
        descriptor, sizes = pack(content)
        try:
            for process in self._processes:
                process.tell(descriptor, sizes)
        finally:
            os.close(descriptor)


class _Process:
    """One of them, that of a share of the pictures."""

    def __init__(self, share: int, shares: int) -> None:
        mine, its = socket.socketpair()
        with its:
            arguments = [its.fileno(), os.getpid(), share, shares]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "common.detection.overlap_main", *map(str, arguments)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection: Connection[Any, Any] = Connection(mine.detach())

    def tell(self, descriptor: int, sizes: list[int]) -> None:
        try:
            self._connection.send(sizes)
            send_handle(self._connection, descriptor, self._process.pid)
        except ConnectionError as error:
            raise self._ended() from error

    def answer(self) -> MaskOverlaps | str:
        """What it found, or the traceback of its failure."""
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
            how = "has closed its connection"
        else:
            how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return RankFailure(f"a process that overlaps masks ({self._process.pid}) {how}")
