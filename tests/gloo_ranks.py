"""Run functions on several ranks in separate processes, connected by gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(work: Callable[[int, int, str], Any], world: int, folder: Path) -> list[Any]:
    """Return the results of ``work(rank, world, folder)`` on ``world`` ranks, in their order.

    Args:
        folder: folder for the results; made if it does not exist. One call can use it.
    """
    folder.mkdir(exist_ok=True)
    mp.start_processes(_run, args=(work, world, str(folder)), nprocs=world, start_method="forkserver")
    return results(world, folder)


def results(world: int, folder: Path) -> list[Any]:
    """Return what an earlier :func:`on_ranks` has returned."""
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(world)]


def _run(rank: int, work: Callable[[int, int, str], Any], world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(work(rank, world, folder), f"{folder}/result_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
