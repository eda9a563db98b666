"""Whether the kernel has killed a process because memory was full, from its own counters.

Control groups (cgroups) count such kills in ``memory.events`` (version 2, with the groups below) or
``memory.oom_control`` (version 1); ``/proc/vmstat`` counts those of the whole machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
GB = 1e9


class MemoryKills:
    """Counters of such kills at the time of construction: of this process's cgroups, else of the whole machine.

    Args:
        proc: folder of the kernel's process information.
        cgroups: folder where cgroups are mounted.
    """

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._before = _counts(_counters_of_cgroups(proc, cgroups)) or _counts([proc / "vmstat"])

    def explain(self) -> str:
        """Return what the counters say of the SIGKILL that a process of these cgroups has just got."""
        grown = [path for path, before in self._before.items() if (_count(path) or 0) > before]
        if not self._before:
            return "the kernel may have run out of memory (see dmesg)"
        if not grown:
            return f"not by the kernel for want of memory: {next(iter(self._before))} counts no such kill"
        if grown[0].name == "vmstat":
            return f"the kernel killed a process of this machine because memory was full: oom_kill in {grown[0]}"
        return f"the kernel killed a process because memory was full: oom_kill in {grown[0]}{_limit(grown[0].parent)}"


def _counters_of_cgroups(proc: Path, cgroups: Path) -> Iterable[Path]:
    """Yield files that count kills, innermost cgroup first.

    A container may see its own cgroup at the mount point, while the kernel names it by its path on the host.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mounted, name = (cgroups, "memory.events") if not controllers else (cgroups / controllers, "memory.oom_control")
        below = Path(path.lstrip("/"))
        yield from (mounted / folder / name for folder in [below, *below.parents])


def _counts(paths: Iterable[Path]) -> dict[Path, int]:
    return {path: count for path in paths if (count := _count(path)) is not None}


def _count(path: Path) -> int | None:
    """Return the number of kills that a file of the kernel counts; None if it does not exist or counts none."""
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _limit(cgroup: Path) -> str:
    """Return the memory that a cgroup, or the first one above it with a limit, may use, as the end of a message."""
    for folder in (cgroup, *cgroup.parents):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal() and int(text) < 1 << 60:  # version 1 writes about 2^63 for no limit
                return f"; {folder} may use {int(text) / GB:.1f} GB"
    return ""
