"""Arrays in numpy's files, read by several threads at a time."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 128
"""What ``numpy.save`` writes before the values of a small number of dimensions."""


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
