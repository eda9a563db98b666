"""Find the git commit of the running source, and whether the source differs from it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMIT, DIRTY = "MLPERF_SUITE_COMMIT", "MLPERF_SUITE_DIRTY"
"""Environment variables that give the source's state inside a container, where git is missing."""


@dataclass(frozen=True)
class Source:
    """Commit of the source, and whether the source differs from it; None if unknown."""

    commit: str | None
    dirty: bool | None


def find_source(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> Source:
    """Return the state of the source below ``root``; the environment variables take precedence over git."""
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
