"""Which of a job's ranks train and which only evaluate.

Each role is a world of its own: its ranks count from 0 and have a default process group of theirs alone, so that no
collective of one role can ever wait for the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.distributed.rank_info import RankInfo

RoleName = Literal["train", "evaluate"]


@dataclass(frozen=True)
class Role:
    """What a rank does in the job, and where it stands among those that do the same.

    Attributes:
        name: what it does.
        rank: among the ranks of the role, from 0.
        world_size: ranks of the role.
        first_rank: the rank in the job of the role's rank 0.
    """

    name: RoleName
    rank: int
    world_size: int
    first_rank: int

    @classmethod
    def of(cls, rank_info: RankInfo, evaluation_ranks: int) -> Role:
        """The role of a place in a job whose last ``evaluation_ranks`` ranks only evaluate."""
        training = rank_info.world_size - evaluation_ranks
        if rank_info.rank < training:
            return cls("train", rank_info.rank, training, 0)
        return cls("evaluate", rank_info.rank - training, evaluation_ranks, training)
