"""Pieces of work that processes do ahead, delivered as soon as they are ready: a slow one does not delay the others.

The pieces have consecutive numbers, and belong to windows of a fixed number of them. Within a window, the smallest
number that is ready comes first, so a slow piece comes late, but before the next window begins. So the set of a
window's pieces depends only on their numbers, and their order also on the time that they take. After P pieces,
:meth:`ReadyQueue.late` has the numbers that are still missing among the first ones; with these, a later queue
continues with exactly the pieces that were not delivered.

A process has one piece at a time. If it is killed, or the piece fails, the piece is done again, once.
"""

from __future__ import annotations

import heapq
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from common.errors import DataError

Piece = TypeVar("Piece")
Result = TypeVar("Result")
TRIES = 2
"""Number of times that a piece is tried before its error ends the queue."""


class ReadyQueue(Generic[Piece, Result]):
    """Does pieces of work in processes; :meth:`take` returns them.

    Args:
        make: does a piece; it is sent to the processes, once.
        piece: returns the piece of a number; called by a thread of this process.
        workers: number of processes.
        ahead: largest number of pieces that are in progress or ready.
        window: pieces per window.
        in_order: deliver the numbers in order, and wait for slow pieces.
        first: number of pieces that were delivered before.
        late: numbers that were not delivered then, though larger ones were.
        end: number of all pieces; None: there is no end.
    """

    def __init__(
        self,
        make: Callable[[Piece], Result],
        piece: Callable[[int], Piece],
        workers: int,
        ahead: int,
        window: int,
        in_order: bool = False,
        first: int = 0,
        late: Sequence[int] = (),
        end: int | None = None,
    ) -> None:
        self._end = end
        self._piece, self._ahead, self._window, self._in_order = piece, ahead, window, in_order
        self._first, self._late_then, self._delivered = first, sorted(late), list[int]()
        self._waiting = [*self._late_then]  # heap of numbers to do, before the following ones
        self._next = first + len(late)
        self._tries: dict[int, int] = {}  # of each piece in progress or ready
        self._ready: list[tuple[int, Any]] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._wake_out, self._wake_in = multiprocessing.Pipe(duplex=False)
        self._workers: dict[Connection, _Worker] = {}
        context = multiprocessing.get_context("spawn")
        for _ in range(workers):
            own, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, make), daemon=True)
            process.start()
            theirs.close()
            self._workers[own] = _Worker(process)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ready queue", daemon=True)
        self._thread.start()

    def take(self) -> tuple[int, Result]:
        """Return number and result of the next piece.

        Raises:
            DataError: a piece failed :data:`TRIES` times, or all processes have ended.
        """
        with self._changed:
            position = self._first + len(self._delivered)
            end = (position // self._window + 1) * self._window
            while not self._deliverable(end):
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            number, result = heapq.heappop(self._ready)
            del self._tries[number]
            self._delivered.append(number)
        self._wake_in.send_bytes(b".")
        return number, result

    def late(self, delivered: int) -> list[int]:
        """Return the numbers that were missing after ``delivered`` pieces, though a larger one had been delivered.

        Args:
            delivered: number of pieces, with those before this queue; at most as many as were taken.
        """
        taken = self._delivered[: delivered - self._first]
        missing = {*self._late_then, *range(self._first + len(self._late_then), max(taken, default=-1) + 1)}
        return sorted(missing.difference(taken))

    def close(self) -> None:
        """Stop thread and processes."""
        with self._changed:
            self._closing = True
        self._wake_in.send_bytes(b".")
        self._thread.join()
        for connection, worker in self._workers.items():
            connection.close()
            worker.process.kill()
            worker.process.join()
        self._wake_out.close()
        self._wake_in.close()

    def _deliverable(self, end: int) -> bool:
        if not self._ready or self._ready[0][0] >= end:
            return False
        return not self._in_order or self._ready[0][0] == min(self._tries)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._give()
                for source in wait([self._wake_out, *self._workers]):
                    if source is self._wake_out:
                        self._wake_out.recv_bytes()
                    else:
                        self._receive(source)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - take raises it in the caller's thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _give(self) -> None:
        """Give the next pieces to idle processes."""
        for connection, worker in [*self._workers.items()]:
            if worker.number is not None:
                continue
            with self._changed:
                if not self._waiting and len(self._tries) < self._ahead and self._next != self._end:
                    heapq.heappush(self._waiting, self._next)
                    self._next += 1
                if not self._waiting or (self._waiting[0] not in self._tries and len(self._tries) >= self._ahead):
                    return
                number = heapq.heappop(self._waiting)
                self._tries[number] = self._tries.get(number, 0) + 1
            worker.number = number
            try:
                connection.send(self._piece(number))
            except OSError:
                self._lose(connection)

    def _receive(self, connection: Connection) -> None:
        worker = self._workers[connection]
        try:
            failed, result = connection.recv()
        except (EOFError, OSError):
            self._lose(connection)
            return
        number, worker.number = worker.number, None
        assert number is not None  # because only processes with a piece send a result
        if not failed:
            with self._changed:
                heapq.heappush(self._ready, (number, result))
                self._changed.notify_all()
        elif self._tries[number] >= TRIES:
            raise result if isinstance(result, DataError) else DataError(f"a reader failed: {result}")
        else:
            heapq.heappush(self._waiting, number)

    def _lose(self, connection: Connection) -> None:
        """Put the piece of a process that has ended back."""
        worker = self._workers.pop(connection)
        connection.close()
        worker.process.join()
        ended = f"a reader process ended with the exit code {worker.process.exitcode}"
        if not self._workers:
            raise DataError(f"{ended}, as all others before: look for the first error, or at the memory of the machine")
        print(f"{ended}; {len(self._workers)} are left, which do its work", file=sys.stderr)
        if worker.number is not None:
            if self._tries[worker.number] >= TRIES:
                raise DataError(f"{ended}, at the same sample as another one before")
            heapq.heappush(self._waiting, worker.number)


class _Worker:
    """A process, and the number of its piece; None if it is idle."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        self.number: int | None = None


def _work(connection: Connection, make: Callable[[Any], Any]) -> None:
    """Do pieces until the other end closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which reach all processes of a job; its first one decides
        signal.signal(number, signal.SIG_IGN)
    try:
        while True:
            piece = connection.recv()
            try:
                answer: tuple[bool, Any] = False, make(piece)
            except DataError as error:
                answer = True, error
            except Exception as error:  # noqa: BLE001 - it is raised in the other process
                answer = True, f"{type(error).__name__}: {error}"
            connection.send(answer)
    except (EOFError, OSError):
        os._exit(0)
