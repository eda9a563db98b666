"""Arrays in bf16, which numpy lacks, stored as a ``.npy`` of their bits as uint16."""

from __future__ import annotations

import io
import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from common.errors import DataError
from common.untrusted.array_file import HEADER_BYTES, parse_header

LONGEST_HEADER = HEADER_BYTES + 12  # with magic, version and length
_BITS = np.dtype("<u2")


def encode(values: Tensor) -> bytes:
    """Return the ``.npy`` of a bf16 array on the CPU.

    Raises:
        TypeError: the array has another dtype.
    """
    if values.dtype != torch.bfloat16:
        raise TypeError(f"{values.dtype} where bf16 is needed")
    bits = values.contiguous().view(torch.int16).numpy().view(_BITS)
    return _header(bits.shape) + bits.tobytes()


def values_offset(begins: bytes, size: int, shape: tuple[int, ...], name: str) -> int:
    """Return the offset of the values in a ``.npy``, in bytes.

    Args:
        begins: first :data:`LONGEST_HEADER` bytes; bytes that follow the ``.npy`` are ignored.
        size: size of the ``.npy`` in bytes.
        shape: required shape.
        name: name of the array, for messages.

    Raises:
        DataError: it is no ``.npy`` of uint16 in C order with this shape, or its size is wrong.
    """
    usual = _header(shape)
    offset = len(usual)
    if not begins.startswith(usual):
        try:
            header = parse_header(io.BytesIO(begins[:size]))
        except ValueError as error:
            raise DataError(f"{name} is no .npy: {error}") from error
        if header.dtype != _BITS or header.shape != shape or header.fortran_order:
            raise DataError(f"{name}: {header.dtype} {header.shape}, expected uint16 {shape} in C order")
        offset = header.offset
    if size != (expected := offset + math.prod(shape) * _BITS.itemsize):
        raise DataError(f"{name} has {size:,} bytes, but uint16 {shape} takes {expected:,}")
    return offset


@lru_cache
def _header(shape: tuple[int, ...]) -> bytes:
    """Return the header that ``numpy.save`` writes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": _BITS.str, "fortran_order": False, "shape": shape})
    return header.getvalue()
