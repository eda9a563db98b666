"""The folder of self-play in a run's output folder: models, games, and the number of starts.

All ranks that train or play share it. Rank 0 prepares it before the others use it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from benchmarks.minigo.models import Models
from benchmarks.minigo.records import delete_games_after, held_out_folder
from common.distributed import job_store
from common.errors import CheckpointError

WAIT_SECONDS = 0.1
"""Interval at which a rank looks whether rank 0 has prepared the folder, in seconds."""


@dataclass(frozen=True)
class RunFolder:
    """Folders and files of self-play."""

    path: Path

    @classmethod
    def below(cls, output_dir: Path) -> RunFolder:
        """Return the folder of the run in ``output_dir``."""
        return cls(output_dir / "self-play")

    @property
    def models(self) -> Models:
        """The models of the run."""
        return Models(self.path / "models")

    @property
    def games(self) -> Path:
        """Folder of the games that the run plays."""
        return self.path / "games"

    def begin(self, first: int, weights: Mapping[str, Tensor]) -> str:
        """Delete the files of an earlier run, and save ``weights`` as the model of generation ``first``.

        Return the start of self-play, for :meth:`started`. Only rank 0 calls this.

        Raises:
            CheckpointError: the model cannot be written, or earlier ones cannot be deleted.
            DataError: earlier games cannot be deleted.
        """
        self._keep(-1)
        self.models.publish(first, weights)
        return json.dumps([first, self._token()])

    def resume(self, generation: int) -> str:
        """Keep models and games up to ``generation``, with which training continues. Later ones are of lost training.

        Games of ``generation`` count, and if its games were complete, the same examples are drawn. Return the start of
        self-play. Only rank 0 calls this.

        Raises:
            CheckpointError: the model of ``generation`` is missing, or later ones cannot be deleted.
            DataError: later games cannot be deleted.
        """
        if not self.models.path(generation).exists():
            raise CheckpointError(
                f"{self.models.path(generation)} is missing: a run resumes with its models and games: give the "
                "output_dir of the run that wrote the checkpoint"
            )
        self._keep(generation)
        return json.dumps([generation, self._token()])

    def started(self, start: str) -> str:
        """Wait for the start of self-play on rank 0, and for its model. Return a token that no other start has.

        Called once on each rank that trains or plays.

        Args:
            start: what rank 0 has begun; ignored on other ranks.

        Raises:
            CheckpointError: this machine does not see the model.
        """
        start = job_store.from_rank_0("start of self-play", start, meanwhile=lambda: time.sleep(WAIT_SECONDS))
        generation, token = json.loads(start)
        self.models.wait_for(generation)
        return str(token)

    def _keep(self, newest: int) -> None:
        self.models.delete_after(newest)
        for folder in (self.games, held_out_folder(self.games)):
            delete_games_after(folder, newest)

    def _token(self) -> str:
        """Return a name for this start of self-play, which no earlier start in the folder has."""
        number = 0
        while True:
            try:
                (self.path / "starts" / str(number)).mkdir(parents=True)
                return str(number)
            except FileExistsError:
                number += 1
