"""Start the ranks of one machine, watch them, and end them together.

The launcher hosts the rendezvous store itself. It therefore gets a free port, and the store outlives every rank, so the
ranks that survive a failure can still agree on its cause.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from common.distributed.environment import integer
from common.distributed.memory_kills import MemoryKills
from common.errors import NOT_CONVERGED, UNFIT, RankFailure, SuiteError

GRACE_SECONDS = 30.0
POLL_SECONDS = 0.05
PARENT_VARIABLE = "MLPERF_SUITE_LAUNCHER_PID"
DRIVER_VARIABLE = "MLPERF_SUITE_DRIVER"
TURN_VARIABLE = "MLPERF_SUITE_TURN"
"""Variable with the path of a file that is locked while a process started by ``measure`` must not use a GPU yet."""
OWN_EXIT_CODES = frozenset({*range(1, 9), NOT_CONVERGED, UNFIT, 128 + signal.SIGINT, 128 + signal.SIGTERM})
# Exit code of a rank that only lost a peer. It prints no message, because the rank that failed first does.
LOST_PEER_EXIT_CODE = 9
# Time to wait for the exit of the rank that failed first when a rank that lost its peer has already exited.
SETTLE_SECONDS = 1.0
PR_SET_PDEATHSIG = 1


@dataclass
class _ChildGroup:
    """Running ranks, and exit codes of the ranks that have ended."""

    ranks: list[subprocess.Popen[bytes]]
    codes: dict[int, int] = field(default_factory=dict)
    memory_kills: MemoryKills = field(default_factory=MemoryKills)
    forwarded: int | None = None

    def poll(self) -> list[tuple[int, int]]:
        """Return rank and return code of the ranks that have ended since the last call."""
        ended = []
        for rank, process in enumerate(self.ranks):
            if rank not in self.codes and (code := process.poll()) is not None:
                self.codes[rank] = code
                ended.append((rank, code))
        return ended

    def running(self) -> list[int]:
        return [rank for rank in range(len(self.ranks)) if rank not in self.codes]

    def send(self, signum: int) -> None:
        """Send a signal to every running rank."""
        for rank in self.running():
            self.ranks[rank].send_signal(signum)

    def kill(self) -> None:
        """Kill all remaining processes, including data readers and other children of the ranks."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for rank in self.running():
            self.codes[rank] = self.ranks[rank].wait()


def relaunch(
    nproc: int,
    argv: Sequence[str],
    *,
    command: Sequence[str] = (sys.executable, "-m", "common.cli"),
    grace_seconds: float = GRACE_SECONDS,
) -> int:
    """Run ``command`` with ``argv`` as ``nproc`` ranks on this machine and wait for all of them.

    SIGTERM and SIGINT are passed on to every rank. When a rank fails, a message names it, unless its exit code is one
    of the suite's own (the rank has then printed a message). The other ranks get SIGTERM and, after
    ``grace_seconds``, SIGKILL. They get no SIGTERM if they are already ending, because a signal was passed on or the
    run missed its target: a second signal could interrupt their last writes.

    Returns:
        0, or the exit code of the rank that failed first; 128 + the signal number if a signal killed it.
    """
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: at least one rank")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    group = _ChildGroup([])
    try:
        with _forwarding(group):
            for rank in range(nproc):
                environment = {**os.environ, **_rank_variables(rank, nproc, store.port)}
                process = subprocess.Popen([*command, *argv], env=environment, process_group=0)
                group.ranks.append(process)
                if group.forwarded is not None:
                    process.send_signal(group.forwarded)
            return _watch(group, grace_seconds)
    finally:
        group.kill()


def has_launcher() -> bool:
    """Return whether :func:`relaunch` or scripts/run.sub watches this rank and reports the rank that failed first."""
    return PARENT_VARIABLE in os.environ or DRIVER_VARIABLE in os.environ


def follow_parent() -> None:
    """Request SIGTERM for this rank when the launcher that started it dies. Does nothing outside of Linux."""
    launcher = integer(os.environ, PARENT_VARIABLE, 0, remedy="only the launcher sets it: unset {name}")
    if not sys.platform.startswith("linux") or os.getppid() != launcher:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def await_turn() -> None:
    """Wait in this rank, after its imports, until the previous measurement has released the GPUs."""
    if name := os.environ.get(TURN_VARIABLE):
        with open(name, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)


def _rank_variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank, with the same names that torchrun uses."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        PARENT_VARIABLE: str(os.getpid()),
    }


@contextlib.contextmanager
def _forwarding(group: _ChildGroup) -> Iterator[None]:
    def forward(signum: int, frame: FrameType | None) -> None:
        group.forwarded = signum
        group.send(signum)

    previous = {signum: signal.signal(signum, forward) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _watch(group: _ChildGroup, grace_seconds: float) -> int:
    """Wait until every rank has ended. Return the exit code of the rank that caused the failure, or 0."""
    failed: list[tuple[int, int]] = []
    settled = deadline = math.inf
    first: tuple[int, int] | None = None
    while group.running() or (failed and first is None):
        failed += [(rank, code) for rank, code in group.poll() if code != 0]
        now = time.monotonic()
        if failed and first is None:
            if settled == math.inf:
                settled, deadline = now + SETTLE_SECONDS, now + grace_seconds
            cause = min(failed, key=_likely_consequence)
            if not _is_consequence(cause[1]) or now >= settled or not group.running():
                first = cause
                _report(first, group)
                if group.forwarded is None and first[1] != NOT_CONVERGED:
                    group.send(signal.SIGTERM)
                # A stopped process handles SIGTERM only after SIGCONT.
                group.send(signal.SIGCONT)
        if now > deadline:
            group.kill()
        if group.running():
            time.sleep(POLL_SECONDS)
    return 0 if first is None else _exit_code(first[1])


def _is_consequence(code: int) -> bool:
    return code in (RankFailure.exit_code, LOST_PEER_EXIT_CODE)


def _likely_consequence(ended: tuple[int, int]) -> tuple[int, int]:
    """Return a sort key for ranks that failed within one poll: causes first, ranks that only lost a peer last."""
    rank, code = ended
    if code < 0:
        return 0, rank
    if _is_consequence(code):
        return 3 if code == RankFailure.exit_code else 4, rank
    return (2 if code == SuiteError.exit_code else 1), rank


def _report(failure: tuple[int, int], group: _ChildGroup) -> None:
    rank, code = failure
    forwarded = group.forwarded
    if code in OWN_EXIT_CODES:
        return
    if code == LOST_PEER_EXIT_CODE:
        text = f"rank {rank} lost the connection to another rank; the other ranks are being stopped"
    elif forwarded is not None and -code == forwarded:
        text = f"stopped by {signal.Signals(forwarded).name}"
    elif code < 0:
        name = signal.Signals(-code).name
        hint = f"; {group.memory_kills.explain()}" if -code == signal.SIGKILL else ""
        text = f"rank {rank} was killed by {name}{hint}; the other ranks are being stopped"
    else:
        text = f"rank {rank} ended with exit code {code}; the other ranks are being stopped"
    print(f"error: {text}", file=sys.stderr, flush=True)


def _exit_code(code: int) -> int:
    if code == LOST_PEER_EXIT_CODE:
        return RankFailure.exit_code
    return 128 - code if code < 0 else code
