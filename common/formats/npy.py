"""Arrays in numpy's files, read by several threads at a time.

Files that this program wrote are read as fast as the disk allows; every other one as anybody's file
(:mod:`common.untrusted.array_file`).
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.untrusted.array_file import MAGIC, Header, mapped, read_header
from common.untrusted.regular_file import open_file

__all__ = ["HEADER_BYTES", "MAGIC", "Header", "load", "mapped", "read_header"]

HEADER_BYTES = 128
"""What ``numpy.save`` writes before the values of a small number of dimensions."""


def load(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Read an array that is expected to be of ``dtype`` and ``shape``; one that is not comes as it is, and mapped.

    Raises:
        OSError, ValueError: the file is missing, cut off, none of numpy's, or of objects.
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
