"""What many tests need: prepared stand-in data for each workload, and runs of the command line."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import WORKLOADS
from common import cli

ROOT = Path(__file__).resolve().parent.parent

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *(path.partition(":")[0] for path in WORKLOADS.values()),
        "common.cli", "common.conclusion", "common.evaluator", "common.trainer", "matplotlib.pyplot", "torch._dynamo",
    ]
)  # fmt: skip
"""Starts processes in which everything slow to import is imported already."""

FORKING = threading.Lock()
"""A process that starts looks after all others; two threads must not both take the exit code of one."""


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    output: str
    errors: str


def suite(*arguments: str, timeout: float = 200, threads: int = 1, cwd: Path = ROOT, **environment: str) -> Finished:
    """Run ``mlperf-suite`` as a process of its own, in the folder ``cwd``.

    It is forked off a process that has imported the suite, which takes longer than most commands.
    """
    settings = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", **environment}
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("output", "errors")]
        process = FORKS.Process(target=_command, args=(arguments, cwd, settings, threads, streams))
        with FORKING:
            process.start()
        ended = connection.wait([process.sentinel], timeout)
        with FORKING:
            if not ended:
                process.kill()
            process.join()
        assert ended, f"mlperf-suite {' '.join(arguments)} ran for more than {timeout} seconds"
        assert process.exitcode is not None
        return Finished(process.exitcode, *(stream.read_text() for stream in streams))


def _command(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], threads: int, streams: Sequence[Path]
) -> None:
    """In the forked process: what the console command does."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    torch.set_num_threads(threads)  # OMP_NUM_THREADS has been read
    sys.argv = ["mlperf-suite", *arguments]
    cli.main()


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


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bf16 as its bits and multiplies matrices of those as integers: widen them before."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product = InterpreterBuilder.create_dot

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
        return product(builder, widened(left), widened(right), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
