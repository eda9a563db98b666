"""Read numpy files with object arrays without executing code.

``numpy.save`` writes an array of objects as a pickle, which :mod:`common.untrusted.pickled_arrays` parses safely.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.errors import DataError
from common.untrusted.array_file import parse_header
from common.untrusted.pickle_scan import MEMORY, scan
from common.untrusted.pickled_arrays import (
    DAMAGE,
    INTEGERS,
    OBJECTS,
    Admitted,
    ArrayUnpickler,
    PickledArray,
    Refused,
)
from common.untrusted.regular_file import open_file

TIMES_LARGER = 16
"""Memory of lists of integers relative to their pickle: an integer with 3 bytes in the file takes up to 46 bytes."""
_ADMITTED = Admitted("integers", (*INTEGERS, OBJECTS))


def read_object_array(path: Path) -> list[Any]:
    """Return the objects in the 1-D object array of the ``.npy`` file ``path``; they may contain numpy arrays.

    Raises:
        DataError: the file is missing, truncated or damaged, has another kind of array, or its pickle contains
            anything except arrays of integers, dicts and lists. In this case, nothing has been executed.
    """
    try:
        with open_file(path) as file:
            shape = _read_npy_header(file)
            start = file.tell()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                scan(whole, start, memory=MEMORY + TIMES_LARGER * len(whole))
            file.seek(start)
            content = _finished(ArrayUnpickler(file, _ADMITTED).load())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except Refused as error:
        raise DataError(f"{path}: {error}; do not use this file, and ask where it comes from") from error
    except DAMAGE as error:
        raise DataError(f"{path} is damaged, or no object array: {type(error).__name__}: {error}") from error
    if not isinstance(content, list) or len(shape) != 1 or len(content) != shape[0]:
        raise DataError(f"{path} holds no one-dimensional array of objects; its header says {list(shape)}")
    return content


def _read_npy_header(file: BinaryIO) -> tuple[int, ...]:
    """Return the shape of an array of objects; ``file`` is then at the start of the pickle."""
    header = parse_header(file)
    if header.dtype != np.dtype(object):
        raise ValueError(f"its array is of {header.dtype}, not of objects")
    return header.shape


def _finished(content: Any) -> Any:
    """Return ``content`` with each :class:`PickledArray` in lists and dicts replaced by its values."""
    if isinstance(content, PickledArray):
        content = content.values
    if isinstance(content, list):
        return [_in_dict(entry) for entry in content]
    return content


def _in_dict(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {key: value.values if isinstance(value, PickledArray) else value for key, value in entry.items()}
