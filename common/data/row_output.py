"""Files of rows that several processes write, each its own, and that have their names when all did."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowOutput:
    """One file.

    Attributes:
        path: of it, once it is complete.
        dtype: numpy's name of it.
        shape: of all rows as an array.
        npy: whether it begins as numpy's files do; otherwise it holds nothing but the rows.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    npy: bool

    @property
    def rows(self) -> int:
        """How many it will have."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._header) + self.rows * self.row_bytes

    @property
    def begun(self) -> bool:
        """Whether all rows, or some of them, are there."""
        return any(path.is_file() and path.stat().st_size == self.size for path in (self.path, self._partial))

    def begin(self) -> None:
        """Make room for all rows, and forget those that are there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        with open(self._partial, "wb") as file:
            file.write(self._header)
            file.truncate(self.size)

    def write(self, first: int, values: NDArray[Any]) -> None:
        """Write rows from ``first`` on, to the disk."""
        if values.dtype != np.dtype(self.dtype) or values.shape[1:] != self.shape[1:]:
            raise ValueError(f"{self.path}: {values.dtype} {values.shape} for {self.dtype} {self.shape}")
        if not 0 <= first <= first + len(values) <= self.rows:
            raise ValueError(f"{self.path}: rows {first} to {first + len(values)} of {self.rows}")
        with open(self._partial, "r+b") as file:
            file.seek(len(self._header) + first * self.row_bytes)
            file.write(np.ascontiguousarray(values).data)
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

    @property
    def _header(self) -> bytes:
        if not self.npy:
            return b""
        written = io.BytesIO()
        described = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(self.dtype)),
            "fortran_order": False,
            "shape": self.shape,
        }
        np.lib.format.write_array_header_1_0(written, described)
        return written.getvalue()
