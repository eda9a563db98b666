"""Skip tests that need more GPUs than there are, and start ranks on several GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.gpu.support import start_rank


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 2 if item.get_closest_marker("multigpu") else 1
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of the module's ``run_rank(rank, world, folder)`` on all ranks, once with 2 GPUs and once with
    4."""
    world = request.param
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as configs/system/auto.yaml has it for runs
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(start_rank, args=(request.module.run_rank, world, folder), nprocs=world)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]
