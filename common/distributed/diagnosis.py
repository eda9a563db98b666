"""Decide which rank blocks the others: a pure function of the latest status of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

SILENT = "gives no sign of life (stopped, killed, or its machine is unreachable); when last heard of"


@dataclass(frozen=True)
class View:
    """Status of a rank as another rank (or the rank itself) knows it.

    Attributes:
        rank: rank that this status describes.
        step: step of its last beat; -1 before the first.
        device_step: last step that its device finished; -1 when unknown.
        phase: phase of its last beat.
        beat_age: seconds since the last beat of its main thread.
        silence: seconds since the last message from its heartbeat thread.
        allowance: longest allowed time in seconds without a beat in this phase.
        extended: whether the allowance is longer than the usual timeout.
        waiting: whether its main thread is in a call that waits for other ranks or for the device.
        where: innermost source line of the suite or the workload that its main thread executes.
        left: whether the rank has finished its part of the run.
        role: role of the rank in the job; only ranks of the same role wait for one another.
        idle: whether the rank waits for work that may never come; it then neither blocks nor excuses others.
    """

    rank: int
    step: int
    device_step: int
    phase: str
    beat_age: float
    silence: float
    allowance: float
    extended: bool = False
    waiting: bool = False
    where: str = ""
    left: bool = False
    role: str = "train"
    idle: bool = False

    def describe(self) -> str:
        """Return step, phase and age of the last beat as text for a message."""
        step = "before its first step" if self.step < 0 else f"step {self.step}"
        device = f", device finished step {self.device_step}" if self.device_step >= 0 else ""
        where = f", at {self.where}" if self.where else ""
        return f"{step}, phase {self.phase!r}{device}, last beat {self.beat_age:.1f} s ago{where}"


@dataclass(frozen=True)
class Diagnosis:
    """Ranks that block the others, and a message about them."""

    ranks: tuple[int, ...]
    text: str


def diagnose(views: Sequence[View], timeout_seconds: float) -> Diagnosis | None:
    """Return the ranks that block the job, or None while every rank is within its limits.

    A rank that waits for others is excused while another rank of its role is in a phase with an extended limit.

    Args:
        views: the last known state of each rank.
        timeout_seconds: largest time without a message from a rank's heartbeat thread.
    """
    silent = [view for view in views if not view.left and view.silence > timeout_seconds]
    if silent:
        return _named(silent, SILENT)
    for role in dict.fromkeys(view.role for view in views):
        found = _diagnose_role([view for view in views if view.role == role and not view.idle])
        if found is not None:
            # The progress of a rank that has been silent for long is unknown, so report the silence instead.
            named = [view for view in views if view.rank in found.ranks and not view.left]
            quiet = [view for view in named if view.silence > timeout_seconds / 2]
            return _named(quiet, SILENT) if quiet else found
    return None


def _diagnose_role(views: Sequence[View]) -> Diagnosis | None:
    """Return the ranks of one role that block the other ranks of this role."""
    present = [view for view in views if not view.left]
    longest = max((view.allowance - view.beat_age for view in present if view.extended), default=0.0)
    expired = [view for view in present if view.beat_age > view.allowance and not (view.waiting and longest > 0)]
    if not expired:
        return None
    stuck = [view for view in expired if not view.waiting]
    if stuck:
        return _named(stuck, "makes no progress, and it is not waiting for other ranks")
    return _waiting(views, expired)


def _waiting(views: Sequence[View], expired: Sequence[View]) -> Diagnosis:
    """Find the rank that the others wait for when every rank past its limit is waiting."""
    left = [view for view in views if view.left]
    if left:
        return _named(left, f"has left the run while {_ranks(expired)} wait for it")
    busy = [view for view in views if view not in expired and not view.waiting]
    if busy:
        return _named(busy, f"goes on without {_ranks(expired)}, which wait for it in {_steps(expired)}")
    for key in (_step_of, _where_of):
        if len({key(view) for view in views}) > 1:
            return _skipped(views, key)
    slowest = min(view.device_step for view in views)
    behind = [view for view in views if view.device_step == slowest]
    if len(behind) < len(views):
        return _named(behind, "has the device that finished fewest steps while all ranks wait")
    return _named(views, "waits like all others, in the same place: the network or a device hangs")


def _skipped(views: Sequence[View], key: Callable[[View], Hashable]) -> Diagnosis:
    """Report the minority when ranks wait in different collectives; report all ranks if no value is less common."""
    counts = Counter(key(view) for view in views)
    fewest = min(counts.values())
    odd = [view for view in views if counts[key(view)] == fewest]
    if len(odd) == len(views):
        return _named(odd, "waits in another collective than the others: one of them skipped a collective")
    others = [view for view in views if view not in odd]
    return _named(odd, f"skipped a collective or made one too many: {_ranks(others)} wait in {_steps(others)}")


def _step_of(view: View) -> Hashable:
    return view.step


def _where_of(view: View) -> Hashable:
    return view.where


def _named(views: Sequence[View], reason: str) -> Diagnosis:
    lines = [f"rank {view.rank} {reason}: {view.describe()}" for view in views[:8]]
    if len(views) > 8:
        lines.append(f"and {len(views) - 8} more: {_ranks(views[8:])}")
    return Diagnosis(tuple(view.rank for view in views), "\n".join(lines))


def _ranks(views: Sequence[View]) -> str:
    shown = ", ".join(str(view.rank) for view in views[:8])
    return f"{'rank' if len(views) == 1 else 'ranks'} {shown}{', …' if len(views) > 8 else ''}"


def _steps(views: Sequence[View]) -> str:
    low, high = min(view.step for view in views), max(view.step for view in views)
    where = views[0].where
    return (f"step {low}" if low == high else f"steps {low} to {high}") + (f", {where}" if where else "")
