"""Test background scoring, and checkpoints that are written during training, on a GPU."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

from common.distributed.weights import Template
from common.evaluation.checkpoint_writer import CheckpointWriter
from tests import toy
from tests.command_line import ENDLESS, await_that, descendants, finish, started, training
from tests.conftest import SECONDS
from tests.gpu.support import GPU, waiting_is_an_error

pytestmark = pytest.mark.gpu

BACKGROUND = ["device=cuda", "evaluation.scoring=background", "evaluation.scorer_threads=1"]


def scores(output: Path) -> list[float]:
    """Return the mean absolute errors of a run's evaluations."""
    lines = (output / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line)["mean_absolute_error"] for line in lines]


def devices(process: psutil.Process) -> set[str]:
    """Return the device files of NVIDIA's driver that a process has open."""
    found = set()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("/dev/nvidia")}


def leads_a_session(pid: int) -> bool:
    """Return whether a process leads a session; False if it has ended."""
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


def test_training_overwrites_the_weights_behind_the_copy_and_never_synchronises(tmp_path: Path) -> None:
    weight = torch.zeros(64 << 20, dtype=torch.float16, device=GPU)
    image = torch.zeros(8, 64, 3, 3, device=GPU).contiguous(memory_format=torch.channels_last)
    weights = {"weight": weight, "image": image}
    writer = CheckpointWriter(tmp_path, Template.of(weights, 1), GPU, 2)
    ramp = torch.arange(image.numel(), device=GPU).reshape(image.shape).float()
    torch.cuda.synchronize()  # the other stream does not wait for this one
    with torch.cuda.stream(torch.cuda.Stream()), waiting_is_an_error():
        for step in range(1, 3):
            weight.fill_(step)
            image.copy_(ramp).mul_(step)
            writer.write(weights)
            weight.fill_(-1)
            image.fill_(-1)
    found = [safetensors.torch.load_file(path) for path in writer.collect(wait=True)]
    for step, tensors in enumerate(found, start=1):
        assert torch.equal(tensors["weight"], torch.full_like(tensors["weight"], step))
        assert torch.equal(tensors["image"], ramp.cpu() * step)
    writer.close()
    assert len(found) == 2
