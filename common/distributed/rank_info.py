"""Position of a process in its job, and its role: some ranks train, others only evaluate.

Each role has a separate world: its ranks count from 0 and share a default process group with no other role, so a
collective of one role never waits for the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RoleName = Literal["train", "evaluate"]


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


@dataclass(frozen=True)
class Role:
    """Role of a rank, and its position among the ranks of this role.

    Attributes:
        rank: rank within the role, from 0.
        world_size: number of ranks in the role.
        first_rank: rank in the job of the role's rank 0.
    """

    name: RoleName
    rank: int
    world_size: int
    first_rank: int

    @classmethod
    def of(cls, rank_info: RankInfo, evaluation_ranks: int) -> Role:
        """Return the role of a rank; the last ``evaluation_ranks`` ranks of the job only evaluate."""
        training = rank_info.world_size - evaluation_ranks
        if rank_info.rank < training:
            return cls("train", rank_info.rank, training, 0)
        return cls("evaluate", rank_info.rank - training, evaluation_ranks, training)
