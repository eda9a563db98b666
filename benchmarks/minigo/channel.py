"""Channel between a self-play worker and the inference server of its GPU.

The arrays are in shared memory: a ring of two slots, so that the worker searches while the network evaluates the leaves
of its other request. A socket has the messages: the number of the request, counted from 0, the number of its leaves,
and the work before it; or, in the answer, the number and the generation of the model. Request n is in slot n % 2. A
receiver sleeps until a message arrives, and sees at once if the other process has ended. The system calls also order
the accesses to the shared memory.

Shapes: B leaves, K bytes of packed planes, A moves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.features import feature_bytes
from common.errors import DeviceError, RankFailure, SuiteError

SLOTS = 2
"""Requests of a worker that may be in flight."""
_REQUEST, _ANSWER = struct.Struct("<qqqqd"), struct.Struct("<qq")
_FAILED = b"failed: "
MEMORY = "/dev/shm"
"""File system of shared memory, on Linux."""
_ALIGNMENT = 64
"""Alignment of the arrays in bytes, a cache line."""


class Slot(NamedTuple):
    """The arrays of one request and its answer, for up to ``capacity`` leaves.

    Attributes:
        bits_BK: packed planes, uint8.
        policy_BA: probabilities of the moves, fp32.
        value_B: value for black, fp32.
    """

    bits_BK: NDArray[np.uint8]
    policy_BA: NDArray[np.float32]
    value_B: NDArray[np.float32]


@dataclass(frozen=True)
class Ring:
    """Sizes of the shared memory.

    Attributes:
        board: lines of the board.
        capacity: largest number of leaves in a request.
    """

    board: int
    capacity: int

    def _layout(self) -> tuple[tuple[tuple[int, ...], type[np.uint8 | np.float32]], ...]:
        moves = self.board**2 + 1
        return (
            ((self.capacity, feature_bytes(self.board)), np.uint8),
            ((self.capacity, moves), np.float32),
            ((self.capacity,), np.float32),
        )

    def _sizes(self) -> list[int]:
        """Return the bytes of each array, rounded up to the alignment."""
        exact = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self._layout()]
        return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in exact]

    @property
    def bytes(self) -> int:
        """Size of the shared memory in bytes."""
        return SLOTS * sum(self._sizes())

    def slots(self, memory: SharedMemory) -> list[Slot]:
        """Return the arrays of all slots in ``memory``."""
        found, offset = [], 0
        for _ in range(SLOTS):
            arrays = []
            for (shape, dtype), size in zip(self._layout(), self._sizes(), strict=True):
                arrays.append(np.ndarray(shape, dtype, memory.buf, offset))
                offset += size
            found.append(Slot(*arrays))
        return found


@dataclass(frozen=True)
class WorkerEnd:
    """The worker's end of a channel, as an argument of its process.

    Attributes:
        memory: name of the shared memory.
    """

    ring: Ring
    memory: str
    connection: Connection


class WorkDone(NamedTuple):
    """Counts of a worker's work since its last request.

    Attributes:
        hits: leaves whose evaluation its cache had.
        games: finished games.
        seconds: time in which it has not waited for answers.
    """

    hits: int = 0
    games: int = 0
    seconds: float = 0.0


NOTHING_DONE = WorkDone()


class Request(NamedTuple):
    """A request that has arrived: its number, its number of leaves, and the work before it."""

    number: int
    leaves: int
    done: WorkDone


def reserved(size: int) -> SharedMemory:
    """Return new shared memory of ``size`` bytes.

    Its pages exist already: otherwise a process is killed by SIGBUS when it writes to memory that the file system in
    :data:`MEMORY` does not have.

    Raises:
        DeviceError: the file system has less space left.
    """
    memory = SharedMemory(create=True, size=size)
    try:
        with open(f"{MEMORY}/{memory.name}", "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        memory.close()
        memory.unlink()
        left = os.statvfs(MEMORY)
        raise DeviceError(
            f"{MEMORY} has no {size} bytes for the leaves of a self-play worker ({error.strerror}; "
            f"{left.f_bavail * left.f_frsize / 2**20:.1f} MB are free): give the container more shared memory, such as "
            "docker run --shm-size=8g or --ipc=host, or use fewer workers (player.workers) or games (player.concurrent)"
        ) from error
    return memory


class ServerEnd:
    """The server's end of a channel. The constructor creates the shared memory, and reserves all of it.

    Args:
        worker: number of the worker, for messages.

    Raises:
        DeviceError: the machine has too little shared memory left.

    Attributes:
        worker_end: argument for the worker's process; call :meth:`started` when that has been started.
        connection: readable when a request has arrived, or when the worker has ended.
    """

    def __init__(self, ring: Ring, worker: int) -> None:
        self.ring, self.worker = ring, worker
        self._memory = reserved(ring.bytes)
        self._slots = ring.slots(self._memory)
        self.connection, theirs = multiprocessing.Pipe()
        self.worker_end = WorkerEnd(ring, self._memory.name, theirs)
        self._next, self._closed = 0, False

    def started(self) -> None:
        """Close this process's copy of the worker's end, so that the end of the worker is noticed."""
        self.worker_end.connection.close()

    def receive(self) -> Request | None:
        """Return the next request, or None if the worker has ended. Waits for a message.

        Raises:
            SuiteError: the worker has failed, and reports this error.
            RankFailure: the worker has sent an invalid message.
        """
        try:
            content = self.connection.recv_bytes()
        except (EOFError, OSError):
            return None
        if content.startswith(_FAILED):
            name, message = content.removeprefix(_FAILED).decode().split(" ", 1)
            kinds = {kind.__name__: kind for kind in SuiteError.__subclasses__()}
            raise kinds[name](message)
        number, count, *done = _REQUEST.unpack(content) if len(content) == _REQUEST.size else (-1, 0)
        if number != self._next or not 1 <= count <= self.ring.capacity:
            raise RankFailure(f"self-play worker {self.worker} sent request {number} of {count} leaves")
        self._next += 1
        return Request(number, count, WorkDone(*done))

    def bits(self, request: Request) -> NDArray[np.uint8]:
        """Return the packed planes of a request, (B, K)."""
        return self._slots[request.number % SLOTS].bits_BK[: request.leaves]

    def answer(
        self, request: Request, policy_BA: NDArray[np.float32], value_B: NDArray[np.float32], generation: int
    ) -> None:
        """Answer a request. Does nothing if the worker has ended, which :meth:`receive` reports."""
        if self._closed:
            return
        slot = self._slots[request.number % SLOTS]
        slot.policy_BA[: request.leaves], slot.value_B[: request.leaves] = policy_BA, value_B
        with contextlib.suppress(OSError):
            self.connection.send_bytes(_ANSWER.pack(request.number, generation))

    def close(self) -> None:
        """Close the connection, and delete the shared memory. The worker sees it when it next uses its end."""
        self._closed = True
        self._slots.clear()
        self.connection.close()
        self._memory.close()
        self._memory.unlink()


class InferenceClient:
    """The worker's side: sends leaves, and receives the network's answers in the same order.

    Attributes:
        capacity: largest number of leaves in a request.
        generation: generation of the model that gave the last answer; -1 before the first answer.

    Raises:
        RankFailure: the server has ended.
    """

    def __init__(self, end: WorkerEnd) -> None:
        self._connection = end.connection
        try:
            self._memory = SharedMemory(end.memory)
        except FileNotFoundError as error:
            raise RankFailure("the inference server of this self-play worker has ended") from error
        self._slots = end.ring.slots(self._memory)
        self.capacity, self.generation = end.ring.capacity, -1
        self._submitted = self._taken = 0
        self._counts = [0] * SLOTS

    @property
    def in_flight(self) -> int:
        """Number of requests whose answers have not been taken."""
        return self._submitted - self._taken

    def submit(self, bits_BK: NDArray[np.uint8], done: WorkDone = NOTHING_DONE) -> None:
        """Send leaves, at most two requests before their answers are taken.

        Args:
            done: the work since the last request.

        Raises:
            ValueError: there are no leaves, more than ``capacity``, or two requests in flight.
            RankFailure: the server has ended.
        """
        count = len(bits_BK)
        if not 1 <= count <= self.capacity or self.in_flight == SLOTS:
            raise ValueError(f"{count} leaves with {self.in_flight} requests in flight: 1 to {self.capacity}, below 2")
        self._slots[self._submitted % SLOTS].bits_BK[:count] = bits_BK
        self._counts[self._submitted % SLOTS] = count
        try:
            self._connection.send_bytes(_REQUEST.pack(self._submitted, count, *done))
        except OSError as error:
            raise RankFailure("the inference server of this self-play worker has ended") from error
        self._submitted += 1

    def take(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Wait for the oldest answer. Return probabilities (B, A) and values (B,), valid until the next submission.

        Raises:
            ValueError: no request is in flight.
            RankFailure: the server has ended.
        """
        if not self.in_flight:
            raise ValueError("no request is in flight")
        try:
            number, self.generation = _ANSWER.unpack(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RankFailure("the inference server of this self-play worker has ended") from error
        assert number == self._taken, f"answer {number} instead of {self._taken}"
        slot, count = self._slots[number % SLOTS], self._counts[number % SLOTS]
        self._taken += 1
        return slot.policy_BA[:count], slot.value_B[:count]

    def fail(self, error: SuiteError) -> None:
        """Report an error, which the server raises."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(_FAILED + f"{type(error).__name__} {error}".encode())

    def close(self) -> None:
        """Close the connection, which tells the server that this worker ends."""
        self._slots.clear()
        self._connection.close()
        self._memory.close()
