"""Arrays in numpy's files, read by several threads at a time."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 128
"""What ``numpy.save`` writes before the values of a small number of dimensions."""
MAGIC: bytes = np.lib.format.MAGIC_PREFIX
"""What every file of numpy's begins with."""


@dataclass(frozen=True)
class Header:
    """What a file says of its array.

    Attributes:
        dtype, shape: of the array.
        fortran_order: whether the first dimension is contiguous.
        offset: bytes before the values.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int


def read_header(path: Path) -> Header:
    """Read what stands before the values, by one thread at a time (:func:`load` says why).

    Raises:
        OSError, ValueError: the file is missing, cut off, none of numpy's, or of a format for names beyond Latin-1.
    """
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"it is of numpy's format {version[0]}.{version[1]}, and 1.0 and 2.0 are known")
        parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = parse(file)
        return Header(dtype, shape, fortran_order, file.tell())


def load(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Read an array that is expected to be of ``dtype`` and ``shape``; one that is not comes as it is.

    The header is compared before it is parsed: numpy parses it with :mod:`ast`, which in CPython 3.11 fails now and
    then where several threads do so (gh-106905). numpy's parser says what is wrong with any other file.

    Raises:
        OSError, ValueError, EOFError: the file is missing, cut off, or none of numpy's.
    """
    expected = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(expected, described)
    with open(path, "rb") as file:
        if file.read(HEADER_BYTES) == expected.getvalue():
            array: NDArray[Any] = np.fromfile(file, dtype, math.prod(shape))
            if array.size == math.prod(shape):
                return array.reshape(shape)
    other: NDArray[Any] = np.load(path, allow_pickle=False)
    return other
