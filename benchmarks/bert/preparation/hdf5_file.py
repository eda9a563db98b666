"""HDF5 files that appear only when they are complete, and errors that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from common.data import atomic
from common.errors import DataError


@contextmanager
def written(path: Path) -> Iterator[h5py.File]:
    """A new file beside ``path``; flushed to the disk and renamed when the block ends well."""
    with atomic.written(path) as partial, h5py.File(partial, "w") as file:
        yield file


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """``path`` for reading.

    Raises:
        DataError: it is missing, no HDF5, or damaged where the block reads it.
    """
    try:
        with h5py.File(path, "r") as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except (OSError, KeyError) as error:
        raise DataError(f"{path} is truncated or no HDF5 file of this kind ({error}); make it again") from error
