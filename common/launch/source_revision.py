"""Which source runs: the commit, and whether anything differs from it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMIT, DIRTY = "MLPERF_SUITE_COMMIT", "MLPERF_SUITE_DIRTY"
"""Variables that say so where there is no git: inside of a container."""


@dataclass(frozen=True)
class Source:
    """The state of the source; None where neither git nor the environment tells."""

    commit: str | None
    dirty: bool | None


def find_source(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> Source:
    """The source below ``root``; the variables, where they are set, come first."""
    if environment.get(COMMIT):
        return Source(environment[COMMIT], environment.get(DIRTY, "true") != "false")
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain")
    return Source(commit or None, None if changes is None else bool(changes))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
