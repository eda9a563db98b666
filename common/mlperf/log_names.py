"""Short names of log files for messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path


def distinct_names(paths: Iterable[Path]) -> dict[Path, str]:
    """Map each path to its shortest trailing part, in whole path components, that no other path shares."""
    waiting = set(paths)
    found: dict[Path, str] = {}
    length = 1
    while waiting:
        ends = {path: "/".join(path.parts[-length:]) for path in waiting}
        shared = Counter(ends.values())
        done = {path for path in waiting if shared[ends[path]] == 1 or length >= len(path.parts)}
        found |= {path: ends[path] for path in done}
        waiting -= done
        length += 1
    return found
