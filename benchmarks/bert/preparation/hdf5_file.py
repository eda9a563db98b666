"""Atomic writing of HDF5 files, and reading with errors that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from common.data import atomic
from common.errors import DataError


@contextmanager
def written(path: Path) -> Iterator[h5py.File]:
    """Open a temporary file beside ``path``; flush it to disk and rename it if the block succeeds.

    If the block fails, the temporary file stays, and the next attempt overwrites it.
    """
    with atomic.written(path) as partial, h5py.File(partial, "w") as file:
        yield file


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open ``path`` for reading.

    Raises:
        DataError: the file is missing or not HDF5, or the block reads a damaged part.
    """
    try:
        with h5py.File(path, "r") as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except (OSError, KeyError) as error:
        raise DataError(f"{path} is truncated or no HDF5 file of this kind ({error}); make it again") from error
