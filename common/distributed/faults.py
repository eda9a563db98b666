"""Heartbeats of the ranks, and an orderly shutdown when a rank stops making progress.

Each rank has two threads. The exchange thread may block on a store whose host has failed. The watch thread only reads
memory and the clock, so it can always decide. Each rank measures the age of its own beats, and listeners measure
silence, so clocks of different machines are never compared.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import linecache
import os
import re
import secrets
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from common.distributed import groups, job_store
from common.distributed.diagnosis import Diagnosis, View, diagnose
from common.distributed.rank_info import RankInfo, RoleName
from common.distributed.status_store import SharedStatusStore, StatusFiles, StatusStore
from common.errors import Interrupted, RankFailure

T = TypeVar("T")
BOARD_ERRORS = (dist.DistError, RuntimeError, OSError, ValueError)
ACKNOWLEDGE_SECONDS = 3.0
COLLECTIVE_TIMEOUT = timedelta(hours=2)
TORCH = str(Path(torch.__file__).parent) + os.sep
TORCH_DISTRIBUTED = os.path.join(TORCH, "distributed") + os.sep
WRAPPERS = frozenset({groups.__file__})
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
# Calls that wait in C++ for a device or a peer, so that their innermost Python frame is in the suite.
WAITING_CALL = re.compile(r"\.(wait|synchronize|item|tolist|cpu)\(")
LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|Timed out waiting \d+ms|Read timeout"
    r"|NCCL communicator was aborted|ncclRemoteError",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class _Verdict:
    """Conclusion of one rank that all ranks adopt."""

    ranks: tuple[int, ...]
    text: str
    claimant: int
    printer: int
    witnesses: tuple[int, ...]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> _Verdict:
        fields = json.loads(value)
        return cls(
            tuple(fields["ranks"]), fields["text"], fields["claimant"], fields["printer"], tuple(fields["witnesses"])
        )


class PeerFailed(RuntimeError):
    """Another rank reported a failure. That rank prints the reason."""


class Heartbeat:
    """Monitor that checks the progress of every rank and ends the job with one message when a rank stalls.

    Create and use it in the main thread, once per run, as a context manager or with :meth:`stop` in a ``finally``.
    Then a main thread that fails because the others are shutting down prints no additional message. After the verdict
    every rank writes the Python stacks of its threads to ``output_dir/stacks_rank<r>.txt`` and exits with
    ``RankFailure.exit_code``.

    Args:
        rank_info: position of this rank in the job.
        output_dir: folder of the run. Ranks also exchange messages here if they lose the store.
        timeout_seconds: longest time without a beat outside :meth:`extended`; 0 or less disables the heartbeat.
        store: store for the messages. Default: the store of the job, else files in ``output_dir/heartbeat``.
        role: role of this rank in the job; ranks of all roles watch one another.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        output_dir: Path,
        timeout_seconds: float,
        store: dist.Store | None = None,
        role: RoleName = "train",
    ) -> None:
        self.rank_info = rank_info
        self.output_dir = Path(output_dir)
        self.timeout_seconds = timeout_seconds
        self.interval_seconds = min(max(timeout_seconds / 10, 0.2), 5.0)
        self.role = role
        self._store = store
        self._status: StatusStore | None = None
        self._token = secrets.token_hex(4)
        self._main = threading.get_ident()
        self._stopping = threading.Event()
        self._left = threading.Event()
        self._threads: list[threading.Thread] = []
        # The main thread replaces the whole tuple, so other threads can read it without a lock.
        self._state: tuple[int, str, float] = (-1, "starting", time.monotonic())
        self._allowance = timeout_seconds
        self._idle = False
        self._device_step = -1
        self._peers: dict[int, tuple[View, float]] = {}
        self._payloads: dict[int, bytes] = {}
        self._leader_token = "early"
        self._started = self._exchanged = time.monotonic()
        self._verdict: _Verdict | None = None

    def start(self) -> None:
        """Start the threads that post and watch heartbeats."""
        if self.timeout_seconds <= 0 or self._threads:
            return
        self.output_dir.mkdir(parents=True, exist_ok=True)
        if self.rank_info.world_size > 1:
            self._status = self._find_status()
            # Longer than the heartbeat timeout: the heartbeat names the late rank, a collective's timeout does not.
            groups.wait_at_most(COLLECTIVE_TIMEOUT)
        self._started = self._exchanged = time.monotonic()
        self._state = (*self._state[:2], time.monotonic())
        self._threads = [threading.Thread(target=self._watch, name="heartbeat watch", daemon=True)]
        if self._status is not None:
            self._threads.append(threading.Thread(target=self._exchange, name="heartbeat exchange", daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, and report to the other ranks that this rank has finished."""
        if not self._threads or self._stopping.is_set():
            return
        self._left.set()
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=2.0)
        if self._verdict is not None:  # The watch thread is ending this process: let it finish its message.
            self._threads[0].join()

    def beat(self, step: int, phase: str) -> None:
        """Record progress: ``step`` has started, in ``phase``. Does no I/O."""
        self._state = (step, phase, time.monotonic())

    def device_step(self, step: int) -> None:
        """Record the last step that the device finished. Does no I/O."""
        self._device_step = step

    @contextlib.contextmanager
    def extended(self, seconds: float, phase: str) -> Iterator[None]:
        """Allow this rank ``seconds`` without a beat inside the block. Entering and leaving it count as beats.

        Ranks that wait for a rank with an extended limit are excused for the same time. The old limit is restored even
        if the block fails.
        """
        step, outer_phase, _ = self._state
        outer, self._allowance = self._allowance, max(self._allowance, seconds)
        self.beat(step, phase)
        try:
            yield
        finally:
            self.beat(self._state[0], outer_phase)
            self._allowance = outer

    @contextlib.contextmanager
    def idle(self, phase: str) -> Iterator[None]:
        """Mark this rank inside the block as waiting for work that may never come, without a time limit.

        Entering and leaving the block count as beats, even if it fails. The rank still notices when another rank sends
        no sign of life.
        """
        step, outer_phase, _ = self._state
        self.beat(step, phase)
        self._idle = True
        try:
            yield
        finally:
            self.beat(self._state[0], outer_phase)
            self._idle = False

    def __enter__(self) -> Heartbeat:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _find_status(self) -> StatusStore:
        if self._store is None:
            self._store = job_store.current()
        if self._store is not None:
            return SharedStatusStore(self._store, max(self.timeout_seconds, 5.0))
        return self._files()

    def _files(self) -> StatusFiles:
        return StatusFiles(self.output_dir / "heartbeat")

    # The exchange thread.

    def _exchange(self) -> None:
        assert self._status is not None
        try:
            while not self._stopping.is_set():
                self._exchange_once(self._status)
                self._stopping.wait(self.interval_seconds)
            self._status.post(f"rank{self.rank_info.rank}", self._payload(time.monotonic()))
        except BOARD_ERRORS:
            return  # A lost store does not come back; the watch thread notices that no messages arrive.

    def _exchange_once(self, store: StatusStore) -> None:
        store.post(f"rank{self.rank_info.rank}", self._payload(time.monotonic()))
        ranks = range(self.rank_info.world_size)
        payloads = store.read([f"rank{rank}" for rank in ranks])
        now = time.monotonic()
        for rank, payload in zip(ranks, payloads, strict=True):
            if payload is None or payload == self._payloads.get(rank):
                continue
            self._payloads[rank] = payload
            fields = json.loads(payload)
            if rank == 0:
                self._leader_token = fields["token"]
            if rank != self.rank_info.rank:
                self._peers[rank] = (View(rank=rank, silence=0.0, **fields["view"]), now)
        self._exchanged = now
        verdict = store.read([self._verdict_name()])[0]
        if verdict is not None:
            self._verdict = _Verdict.decode(verdict)

    def _payload(self, now: float) -> bytes:
        fields = asdict(self._own_view(now))
        del fields["rank"], fields["silence"]
        return json.dumps({"token": self._token, "time": now, "view": fields}).encode()

    def _verdict_name(self) -> str:
        token = self._token if self.rank_info.rank == 0 else self._leader_token
        return f"verdict-{token}"

    # The watch thread.

    def _watch(self) -> None:
        previous, suspected = time.monotonic(), False
        while not self._stopping.wait(self.interval_seconds):
            now = time.monotonic()
            pause, previous = now - previous - self.interval_seconds, now
            if self._verdict is not None:
                self._end(self._verdict)
            if pause > max(1.0, self.timeout_seconds / 2):
                self._forgive(pause)
                continue
            diagnosis = self._diagnose(now)
            # Require two diagnoses in a row: between them the other ranks post their latest status.
            if diagnosis is not None and suspected:
                self._end(self._agree(diagnosis))
            suspected = diagnosis is not None
        if self._verdict is not None:
            self._end(self._verdict)

    def _forgive(self, pause: float) -> None:
        """Exclude ``pause`` seconds, in which this process was stopped, from all ages and silences."""
        step, phase, beat = self._state
        self._state = (step, phase, beat + pause)
        self._started += pause
        self._exchanged += pause
        self._peers = {rank: (view, heard + pause) for rank, (view, heard) in self._peers.items()}

    def _own_view(self, now: float) -> View:
        step, phase, beat = self._state
        age = max(0.0, now - beat)
        waiting, where = self._locate() if age > self.timeout_seconds / 4 else (False, "")
        allowance, left = self._allowance, self._left.is_set()
        extended = allowance > self.timeout_seconds
        return View(
            self.rank_info.rank, step, self._device_step, phase, age, 0.0, allowance, extended, waiting, where, left,
            self.role, self._idle,
        )  # fmt: skip

    def _views(self, now: float) -> list[View]:
        """Return the last known status of every rank, with ages and silences computed at time ``now``."""
        views = []
        for rank in range(self.rank_info.world_size):
            if rank == self.rank_info.rank:
                views.append(self._own_view(now))
            elif rank in self._peers:
                view, heard = self._peers[rank]
                silence = max(0.0, now - heard)
                views.append(replace(view, silence=silence, beat_age=view.beat_age + silence))
            else:
                silence = max(0.0, now - self._started)
                views.append(View(rank, -1, -1, "starting", silence, silence, self.timeout_seconds))
        return views

    def _diagnose(self, now: float) -> Diagnosis | None:
        if self._status is None:
            return diagnose(self._views(now), self.timeout_seconds)
        exchanged = self._exchanged
        unreachable = now - exchanged
        if unreachable <= self.timeout_seconds:
            # Use the time of the last exchange: an unresponsive store would make every other rank appear silent.
            return diagnose(self._views(exchanged), self.timeout_seconds)
        if isinstance(self._status, StatusFiles):
            return Diagnosis((), f"{self._status.folder} has been unreachable for {unreachable:.1f} s")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or self.rank_info.rank == 0:
            return Diagnosis((), f"the launcher's store has been unreachable for {unreachable:.1f} s")
        text = f"rank 0, which hosts the store, gives no sign of life for {unreachable:.1f} s (stopped, killed, or its "
        return Diagnosis((0,), f"{text}machine is unreachable): {self._views(now)[0].describe()}")

    def _agree(self, diagnosis: Diagnosis) -> _Verdict:
        """Return one verdict for all ranks: the first that any rank posts."""
        rank = self.rank_info.rank
        alive = [v.rank for v in self._views(time.monotonic()) if v.silence <= self.timeout_seconds and not v.left]
        mine = _Verdict(diagnosis.ranks, diagnosis.text, rank, min(alive, default=rank), tuple(alive))
        name, value = self._verdict_name(), mine.encode()
        for store in self._stores():
            standing = _bounded(partial(store.claim, name, value), 2.0)
            if standing is not None:
                return _Verdict.decode(standing)
        return mine

    def _stores(self) -> list[StatusStore]:
        """Return the status stores to use for the verdict, including files when the store may be lost."""
        if self._status is None:
            return []
        lost = time.monotonic() - self._exchanged > max(self.timeout_seconds / 2, 2 * self.interval_seconds)
        if not lost:
            return [self._status, self._files()]
        return [] if isinstance(self._status, StatusFiles) else [self._files()]

    def _end(self, verdict: _Verdict) -> None:
        """Write the stacks, let one rank print the message, and exit the process."""
        self._verdict = verdict
        self._write_stacks(verdict)
        rank, stores = self.rank_info.rank, self._stores()
        name = self._verdict_name()
        _post(stores, f"{name}-stacks{rank}")
        acknowledged = [f"{name}-stacks{witness}" for witness in verdict.witnesses]
        if verdict.printer == rank:
            _wait_for(stores, acknowledged, ACKNOWLEDGE_SECONDS)
            self._print(verdict)
            _post(stores, f"{name}-printed")
            # If this rank hosts the store, the others need time to read that the message was printed.
            time.sleep(self.interval_seconds if stores else 0.0)
        elif not _wait_for(stores, [f"{name}-printed"], ACKNOWLEDGE_SECONDS + 2) and verdict.claimant == rank:
            self._print(verdict)
        os._exit(RankFailure.exit_code)

    def _print(self, verdict: _Verdict) -> None:
        stacks = sorted(path.name for path in self.output_dir.glob("stacks_rank*.txt"))
        where = (
            f"{self.output_dir}/{{{', '.join(stacks)}}}" if len(stacks) <= 4 else f"{self.output_dir}/stacks_rank*.txt"
        )
        sys.stderr.write(f"\nerror: {verdict.text}\nPython stacks of the ranks: {where}\n")
        sys.stderr.flush()

    def _write_stacks(self, verdict: _Verdict) -> None:
        path = self.output_dir / f"stacks_rank{self.rank_info.rank}.txt"
        views = "\n".join(f"rank {view.rank}: {view.describe()}" for view in self._views(time.monotonic()))
        with contextlib.suppress(OSError), path.open("w") as file:
            file.write(f"{verdict.text}\n\nas seen by rank {self.rank_info.rank} (process {os.getpid()}):\n{views}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _locate(self) -> tuple[bool, str]:
        """Return whether the main thread waits for peers or the device, and its innermost line outside of libraries."""
        innermost = sys._current_frames().get(self._main)
        if innermost is None:
            return False, ""
        frame: FrameType | None = innermost
        collective = ""
        while frame is not None and _is_library(frame.f_code.co_filename):
            if frame.f_code.co_filename.startswith(TORCH_DISTRIBUTED) and frame.f_code.co_name != "wrapper":
                collective = frame.f_code.co_name
            frame = frame.f_back
        if frame is None:
            return bool(collective), collective
        path = Path(frame.f_code.co_filename)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        waiting = bool(collective) or (frame is innermost and WAITING_CALL.search(line) is not None)
        prefix = f"{collective} from " if collective else ""
        return waiting, f"{prefix}{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"


class GracefulStop:
    """Signal handler that turns the first SIGTERM or SIGINT into a flag; the previous handler gets the second one.

    An :class:`Interrupted` that leaves its ``with`` block receives the signal.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """Return whether a signal has arrived."""
        return self.signal is not None

    def install(self) -> None:
        """Install the handlers of both signals; only the main thread may call this."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._handle)

    def restore(self) -> None:
        """Reinstall the previous handlers of both signals."""
        while self._previous:
            signum, handler = self._previous.popitem()
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def __enter__(self) -> GracefulStop:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.restore()
        if isinstance(error, Interrupted) and self.signal is not None:
            error.came_by(self.signal)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            self.restore()
            signal.raise_signal(signum)
            return
        self.signal = signal.Signals(signum)


def lost_peer(error: BaseException, rank: int) -> RankFailure | None:
    """Return the one-line error for a failure that another rank caused; None for any other error."""
    if not isinstance(error, PeerFailed) and (
        not isinstance(error, (dist.DistError, RuntimeError)) or LOST_PEER.search(str(error)) is None
    ):
        return None
    return RankFailure(f"rank {rank} lost the connection to another rank; the rank that failed first says why")


def _is_library(filename: str) -> bool:
    """Return whether a frame belongs to torch, the standard library or our wrappers of collectives.

    The caller of such a frame is more informative.
    """
    if filename.startswith((TORCH, "<")) or filename in WRAPPERS:
        return True
    return filename.startswith(STANDARD_LIBRARY) and "-packages" + os.sep not in filename


def _bounded(call: Callable[[], T], seconds: float) -> T | None:
    """Return the result of ``call``; None if it fails or takes longer than ``seconds``, as a hung store may."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(*BOARD_ERRORS):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _post(stores: list[StatusStore], name: str) -> None:
    if stores:
        _bounded(lambda: stores[0].post(name, b"1"), 1.0)


def _wait_for(stores: list[StatusStore], names: list[str], seconds: float) -> bool:
    """Wait until all ``names`` are in the first store; False if the time is over or the store is lost."""
    deadline = time.monotonic() + seconds
    while stores and time.monotonic() < deadline:
        values = _bounded(lambda: stores[0].read(names), 1.0)
        if values is None:
            return False
        if all(value is not None for value in values):
            return True
        time.sleep(0.1)
    return False
