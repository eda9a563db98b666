"""Arrays in ``.npy`` files, read by several threads at a time.

Files with the header that this program writes are read at the speed of the disk. All others are read as untrusted
files (:mod:`common.untrusted.array_file`).
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.untrusted.array_file import HEADER_BYTES as _HEADER_LIMIT
from common.untrusted.array_file import MAGIC, Header, mapped, parse_header, read_header
from common.untrusted.regular_file import open_file

__all__ = ["HEADER_BYTES", "MAGIC", "Header", "load", "mapped", "read_header", "required", "viewed"]

HEADER_BYTES = 128
"""Size of the header that ``numpy.save`` writes for an array of few dimensions."""
_LONGEST_HEADER = _HEADER_LIMIT + 12  # with magic, version and length


def viewed(data: memoryview) -> NDArray[Any]:
    """Return the array in ``data``, the content of a ``.npy`` file, as a view.

    Raises:
        ValueError: the content is truncated, has bytes after the values, is not in NumPy's format, or has objects.
    """
    header = parse_header(io.BytesIO(data[:_LONGEST_HEADER]))
    if header.bytes != len(data):
        raise ValueError(f"{header.dtype} of shape {header.shape} takes {header.bytes:,} bytes, it has {len(data):,}")
    order = "F" if header.fortran_order else "C"
    values = np.frombuffer(data[header.offset :], header.dtype)
    return values.reshape(header.shape, order=order)  # type: ignore[call-overload]


def load(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array that should have ``dtype`` and ``shape``. Any other array is returned too, memory-mapped.

    Raises:
        OSError, ValueError: the file is missing, truncated, not in NumPy's format, or has objects.
    """
    expected = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(expected, described)
    with open_file(path) as file:
        if file.read(HEADER_BYTES) == expected.getvalue():
            array: NDArray[Any] = np.fromfile(file, dtype, math.prod(shape))
            if array.size == math.prod(shape):
                return array.reshape(shape)
    return mapped(path)


def required(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], remedy: str) -> NDArray[Any]:
    """Return the array of a file, which must have ``dtype`` and ``shape``.

    Args:
        remedy: advice to the user, for messages.

    Raises:
        DataError: the file is missing, truncated or damaged, or its array has another dtype or shape.
    """
    try:
        array = load(path, dtype, shape)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}; {remedy}") from error
    if array.dtype != dtype or array.shape != shape:
        raise DataError(f"{path}: {array.dtype} {array.shape}, expected {dtype} {shape}; {remedy}")
    return array
