"""Memory statistics of the host."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

PROC = Path("/proc")


def meminfo(proc: Path = PROC) -> dict[str, int]:
    """Return ``/proc/meminfo`` with sizes in bytes; empty if the file does not exist."""
    with contextlib.suppress(OSError):
        lines = re.findall(r"^(\S+):\s+(\d+)( kB)?$", (proc / "meminfo").read_text(), re.MULTILINE)
        return {name: int(value) * (1024 if unit else 1) for name, value, unit in lines}
    return {}
