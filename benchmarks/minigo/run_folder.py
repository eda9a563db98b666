"""The folder of self-play in a run's output folder: models, games, the target's digest, and the number of starts.

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
from common.data.atomic import write_text
from common.distributed import job_store
from common.errors import CheckpointError, DataError
from common.untrusted.regular_file import read_text

TARGET_DIGEST = "target.sha256"
"""File with the SHA-256 of the target that evaluates the run."""
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

    def use_target(self, data_dir: Path, digest: str) -> None:
        """Record which target evaluates the run. Only rank 0 calls this.

        Args:
            data_dir: folder of the prepared data with the target.
            digest: SHA-256 of the target's file, hexadecimal.

        Raises:
            DataError: the run began with another target, or the file cannot be written.
        """
        self.require_target(data_dir, digest)
        path = self.path / TARGET_DIGEST
        try:
            write_text(path, digest)
        except OSError as error:
            raise DataError(f"{path} cannot be written ({error.strerror}); free some space and resume") from error

    def require_target(self, data_dir: Path, digest: str) -> None:
        """Refuse another target than that of the run, if it is recorded; see :meth:`use_target`.

        Raises:
            DataError: the run began with another target.
        """
        path = self.path / TARGET_DIGEST
        if path.exists() and read_text(path) != digest:
            raise DataError(
                f"the target in {data_dir} is not the one with which the run in {self.path.parent} began, of which "
                f"{path} has the SHA-256: give the data_dir with that target"
            )

    def begin(self, first: int, weights: Mapping[str, Tensor]) -> str:
        """Delete the files of an earlier run, and save ``weights`` as the model of generation ``first``.

        Return the start of self-play, for :meth:`started`. Only rank 0 calls this.

        Raises:
            CheckpointError: the model cannot be written, or earlier ones cannot be deleted.
            DataError: earlier games cannot be deleted.
        """
        self._keep(-1)
        (self.path / TARGET_DIGEST).unlink(missing_ok=True)
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
            start: the result of :meth:`begin` or :meth:`resume` on rank 0; ignored on other ranks.

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
