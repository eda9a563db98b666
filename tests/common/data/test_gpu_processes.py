"""Processes of a preparation that runs networks: their number, device and threads."""

from __future__ import annotations

import pytest
import torch

from common.data.gpu_processes import NetworkProcesses
from common.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("device", "gpus", "tasks", "workers", "expected"),
    [
        ("cpu", 4, 100, 6, ("cpu", 6, 1)),
        ("auto", 0, 100, 6, ("cpu", 6, 1)),
        ("auto", 4, 100, 6, ("cuda", 4, 1)),
        ("cuda", 4, 100, 64, ("cuda", 4, 16)),
        ("auto", 4, 2, 64, ("cuda", 2, 32)),
        ("cpu", 0, 2, 7, ("cpu", 2, 3)),
        ("cpu", 0, 0, 1, ("cpu", 1, 1)),
    ],
)
def test_there_is_one_process_per_gpu_or_worker_and_no_idle_one(device, gpus, tasks, workers, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = NetworkProcesses.chosen(device, tasks, workers)
    assert (found.device, found.count, found.threads) == expected


def test_gpus_that_are_asked_for_must_be_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="--device=cuda: PyTorch finds no GPU here"):
        NetworkProcesses.chosen("cuda", 1, 1)


@pytest.mark.parametrize(("device", "expected"), [("cpu", 3), ("cuda", 1)])
def test_threads_are_restored_and_networks_freed_even_after_an_error(device, expected, tmp_path):
    before, freed, found = torch.get_num_threads(), [], []

    def fail() -> dict[str, int]:
        found.append(torch.get_num_threads())
        raise DataError("damaged")

    with (
        pytest.raises(DataError, match="damaged"),
        NetworkProcesses(device, 1, 3).stages(tmp_path, lambda: freed.append(True)) as stages,
    ):
        stages.run("threads", {"one": ()}, fail)
    assert (found, torch.get_num_threads(), freed) == ([expected], before, [True])
