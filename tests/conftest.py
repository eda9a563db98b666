"""What many tests need: prepared stand-in data for each workload, and runs of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common import cli

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    output: str
    errors: str


def suite(*arguments: str, timeout: float = 200, threads: int = 1, cwd: Path = ROOT, **environment: str) -> Finished:
    """Run ``mlperf-suite`` as a process of its own, in the folder ``cwd``."""
    settings = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        [sys.executable, "-m", "common.cli", *arguments],
        cwd=cwd, env=settings, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def prepared(workload: str, root: Path, extra: Sequence[str] = ()) -> Path:
    """Generate and prepare the data of the workload's ``test`` recipe under ``root``."""
    raw, data = root / "raw", root / "data"
    for arguments in (
        ["generate", f"benchmark={workload}", "scale=test", "--raw-dir", str(raw), *extra],
        ["prepare", f"benchmark={workload}", "--raw-dir", str(raw), "--data-dir", str(data)],
    ):
        assert cli.run(arguments) == 0
    return data


@pytest.fixture(scope="session")
def data_of(tmp_path_factory: pytest.TempPathFactory):
    """A function from a workload's name to its prepared test data, made once a session."""
    made: dict[str, Path] = {}

    def find(workload: str) -> Path:
        if workload not in made:
            made[workload] = prepared(workload, tmp_path_factory.mktemp(workload))
        return made[workload]

    return find


def checkpoint(folder: Path, step: int, rank: int = 0) -> dict:
    """The content of a run's checkpoint after ``step``."""
    return torch.load(folder / "checkpoints" / f"step_{step:08d}" / f"rank_{rank}.pt", weights_only=True)


def flatten(state: dict, prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors in a nested state, by path."""
    found = {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, dict | list | tuple):
            found |= flatten(value, f"{prefix}{key}.")
    return found
