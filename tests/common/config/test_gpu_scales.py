"""A scale that names GPUs never runs on a CPU by accident."""

from __future__ import annotations

import pytest

from common import cli
from common.errors import ConfigError, DeviceError


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("scale", ["1xGPU", "8xH200", "64xH100"])
def test_without_a_gpu_it_is_an_error_that_says_how_to_run_on_the_cpu(scale, capsys):
    assert cli.run(["train", "benchmark=resnet", f"scale={scale}"]) == DeviceError.exit_code
    message = capsys.readouterr().err
    assert "CUDA_VISIBLE_DEVICES='' shows none" in message
    assert "device=cpu" in message


def test_on_a_cpu_that_was_asked_for_it_starts(capsys):
    refused = cli.run(["train", "benchmark=resnet", "scale=64xH100", "device=cpu"])
    assert refused == ConfigError.exit_code
    assert "8 nodes need a launcher that starts 64 ranks" in capsys.readouterr().err
