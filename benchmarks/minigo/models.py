"""The models of a run: one file per generation, which training writes, and self-play and evaluation read.

A file is the hand-over of a model. It gets its name by a rename when it is complete, and never changes afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.data.atomic import written
from common.distributed.shared_folder import LATE_SECONDS, appeared
from common.errors import CheckpointError
from common.formats.safetensors_file import read_tensors, write_tensors

SUFFIX = ".safetensors"


def write_model(path: Path, weights: Mapping[str, Tensor], generation: int) -> None:
    """Write a model atomically; see :meth:`Models.publish`."""
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}
    try:
        with written(path) as partial:
            write_tensors(partial, tensors, {"generation": str(generation)})
    except OSError as error:
        raise CheckpointError(f"{path}: the model cannot be written ({error.strerror}); free some space") from error


class Models:
    """The folder of the models.

    Args:
        folder: need not exist before the first model.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, generation: int) -> Path:
        """Return the file of a generation."""
        return self._folder / f"{generation:06d}{SUFFIX}"

    def publish(self, generation: int, weights: Mapping[str, Tensor]) -> None:
        """Write the model of ``generation``. From then on, self-play uses it.

        Args:
            weights: the tensors of :class:`benchmarks.minigo.model.MiniGo`, by name.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be written to.
        """
        write_model(self.path(generation), weights, generation)

    def newest(self) -> int | None:
        """Return the newest generation, or None without models."""
        names = [path.stem for path in self._folder.glob(f"*{SUFFIX}")]
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def wait_for(self, generation: int) -> None:
        """Wait until this machine sees the model of ``generation``, which another one has published.

        Raises:
            CheckpointError: it does not appear.
        """
        if not appeared(self.path(generation)):
            raise CheckpointError(
                f"{self.path(generation)} has not appeared on this machine within {LATE_SECONDS:.0f} s after another "
                "rank has written it: the ranks do not share the folder, or its file system shows new files too late"
            )

    def delete_after(self, generation: int) -> None:
        """Delete the models of all generations after ``generation``, which belong to lost training.

        Raises:
            CheckpointError: they cannot be deleted.
        """
        while (newest := self.newest()) is not None and newest > generation:
            try:
                self.path(newest).unlink()
            except OSError as error:
                raise CheckpointError(f"{self.path(newest)} cannot be deleted ({error.strerror})") from error

    def read(self, generation: int, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors of a generation on ``device``, by name.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        return read_tensors(self.path(generation), device)
