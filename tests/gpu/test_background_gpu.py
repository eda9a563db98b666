"""Scoring in the background beside training on a GPU: the scores of scoring in line, by a process without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import psutil
import pytest
import torch

from tests import toy
from tests.command_line import ENDLESS, await_that, descendants, finish, started, training
from tests.conftest import SECONDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BACKGROUND = ["device=cuda", "evaluation.scoring=background", "evaluation.scorer_threads=1"]


def scores(output: Path) -> list[float]:
    """The errors of a run's evaluations."""
    lines = (output / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line)["mean_absolute_error"] for line in lines]


def devices(process: psutil.Process) -> set[str]:
    """The files of NVIDIA's driver that a process has open."""
    found = set()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("/dev/nvidia")}


def leads_a_session(pid: int) -> bool:
    """Whether a process, which may have ended, has a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid) == pid
    return False


def test_scores_are_those_of_scoring_in_line(data_of, tmp_path):
    data = data_of(toy.NAME)
    for name, overrides in (("in line", ["device=cuda"]), ("background", BACKGROUND)):
        with started(training(data, tmp_path / name, *overrides), CUDA_VISIBLE_DEVICES="0") as process:
            done = finish(process, SECONDS)
        assert done.code == 0, done.errors
    expected = scores(tmp_path / "in line")
    assert len(expected) >= 3
    assert scores(tmp_path / "background") == pytest.approx(expected, rel=1e-3)


def test_the_scorer_has_no_gpu_open(data_of, tmp_path):
    output = tmp_path / "out"
    arguments = training(data_of(toy.NAME), output, *ENDLESS, *BACKGROUND)
    with started(arguments, CUDA_VISIBLE_DEVICES="0") as process:
        log = output / "mlperf.log"
        await_that(lambda: log.exists() and '"eval_stop"' in log.read_text(), process)
        (scorer,) = [child for child in descendants(process.pid) if leads_a_session(child.pid)]
        assert devices(psutil.Process(process.pid))
        assert devices(scorer) == set()
