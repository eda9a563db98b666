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

from common.untrusted.array_file import MAGIC, Header, mapped, read_header
from common.untrusted.regular_file import open_file

__all__ = ["HEADER_BYTES", "MAGIC", "Header", "load", "mapped", "read_header"]

HEADER_BYTES = 128
"""Size of the header that ``numpy.save`` writes for an array of few dimensions."""


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
