"""Two and four gloo ranks train the U-Net as one rank does that accumulates, noise included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from tests.benchmarks.stable_diffusion.unet_ranks import SHARDS, run_rank, train

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    return train(1, 0, "none")


@pytest.mark.parametrize("world", SHARDS)
def test_ranks_end_with_the_weights_of_one_that_accumulates(world, alone, tmp_path: Path):
    mp.start_processes(run_rank, args=(world, str(tmp_path)), nprocs=world, start_method="forkserver")
    for rank in range(world):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
