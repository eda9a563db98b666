"""Position of a process in its job, and its role: some ranks train, others only play games or only evaluate.

Each role has a separate world: its ranks count from 0 and share a default process group with no other role, so a
collective of one role never waits for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RoleName = Literal["train", "play", "evaluate"]
ROLES: tuple[RoleName, ...] = ("train", "play", "evaluate")
"""All roles, in the order of their ranks."""


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
    def of(cls, rank_info: RankInfo, others: Mapping[str, int]) -> Role:
        """Return the role of a rank.

        Args:
            others: number of ranks of each role but ``train``, which all remaining ranks have; a missing role has none.
        """
        first_rank = 0
        for name in ROLES:
            size = rank_info.world_size - sum(others.values()) if name == "train" else others.get(name, 0)
            if rank_info.rank < first_rank + size:
                return cls(name, rank_info.rank - first_rank, size, first_rank)
            first_rank += size
        raise ValueError(f"rank {rank_info.rank} lies outside a job of {rank_info.world_size} ranks")
