"""A file of rows that several processes write, each its own, and that has its name when all did."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.recommendation.criteo.sample_rows import WORD


@dataclass(frozen=True)
class RowOutput:
    """One file.

    Attributes:
        path: of it, once it is complete.
        rows: how many it will have.
        words: of a row.
    """

    path: Path
    rows: int
    words: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.rows * self.words * WORD

    @property
    def begun(self) -> bool:
        """Whether all rows, or some of them, are there."""
        return any(path.is_file() and path.stat().st_size == self.size for path in (self.path, self._partial))

    def begin(self) -> None:
        """Make room for all rows, and forget those that are there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        with open(self._partial, "wb") as file:
            file.truncate(self.size)

    def write(self, first: int, words_NW: NDArray[np.int32]) -> None:
        """Write rows from ``first`` on, to the disk."""
        if words_NW.dtype != np.int32 or words_NW.shape[1:] != (self.words,):
            raise ValueError(f"{self.path}: {words_NW.dtype} {words_NW.shape} for rows of {self.words} words")
        if not 0 <= first <= first + len(words_NW) <= self.rows:
            raise ValueError(f"{self.path}: rows {first} to {first + len(words_NW)} of {self.rows}")
        with open(self._partial, "r+b") as file:
            file.seek(first * self.words * WORD)
            file.write(np.ascontiguousarray(words_NW).data)
            file.flush()
            os.fdatasync(file.fileno())

    def finish(self) -> None:
        """Give it its name; nothing to do where it has it."""
        if self._partial.exists():
            with open(self._partial, "rb") as file:
                os.fsync(file.fileno())
            self._partial.replace(self.path)

    @property
    def _partial(self) -> Path:
        return self.path.with_name(f"{self.path.name}.partial")
