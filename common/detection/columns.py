"""Columns in ``.npy`` files: written completely or not at all, and read with the expected type and size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data import atomic
from common.errors import DataError
from common.formats import npy


def write_columns(folder: Path, columns: Mapping[str, NDArray[Any]]) -> list[Path]:
    """Write each column as ``<name>.npy`` into ``folder``, which is created if needed; return the files."""
    made = {folder / f"{name}.npy": column for name, column in columns.items()}
    for path, column in made.items():
        atomic.save(path, column)
    return list(made)


def read_column(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the array of a ``.npy`` file. A ``dtype`` of bytes without a length accepts any length.

    Raises:
        DataError: the file is missing, truncated, or of another type or size.
    """
    try:
        column = npy.load(path, dtype, shape)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    same = column.dtype.kind == "S" if dtype == np.dtype(np.bytes_) else column.dtype == dtype
    if not same or column.shape != shape:
        raise DataError(f"{path}: is {column.dtype} {column.shape}, not {dtype} {shape}; prepare the data anew")
    return column
