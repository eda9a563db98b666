"""Files of rows that several processes write together; renamed to their final names when all rows are complete."""

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
    """One file of rows.

    Attributes:
        path: final path of the file.
        shape: shape of the array of all rows.
        npy: whether the file starts with a numpy header; otherwise it contains only the rows.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    npy: bool

    @property
    def rows(self) -> int:
        """Number of rows of the complete file."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self._header) + self.rows * self.row_bytes

    @property
    def begun(self) -> bool:
        """Whether the file exists with its full size: complete, or with rows that are still to be written."""
        return any(path.is_file() and path.stat().st_size == self.size for path in (self.path, self._partial))

    def begin(self) -> None:
        """Create the file with its full size, and delete existing rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        with open(self._partial, "wb") as file:
            file.write(self._header)
            file.truncate(self.size)

    def write(self, first: int, values: NDArray[Any]) -> None:
        """Write ``values`` as the rows from ``first`` on, and flush them to the disk."""
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
        """Rename the file to its final path; does nothing if that was done before."""
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
