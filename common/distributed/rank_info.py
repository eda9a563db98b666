"""Position of a process in its job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """Position of this process in the job.

    Attributes:
        rank: global rank, from 0.
        world_size: number of ranks in the job.
        local_rank: rank within this machine; selects the GPU.
        local_world_size: number of ranks on this machine.
        node: index of this machine in the job.
        launcher: ``"torchrun"`` (also the suite's own launcher), ``"slurm"`` or ``"single"``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    launcher: str
