"""Untrusted ``.npy`` and ``.npz`` files: headers within bounds, and sizes checked against the file's size.

NumPy reads a file that begins like a zip as an archive, whatever its name. It also evaluates a header as Python:
thousands of brackets overflow it, and in several threads CPython 3.11 sometimes returns wrong results (gh-106905).
This module matches headers against a pattern, and allocates no memory for values that the file does not have.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from common.untrusted.archives import BAD_ZIP, bounded_zip
from common.untrusted.regular_file import open_file

MAGIC: bytes = np.lib.format.MAGIC_PREFIX
"""First bytes of every ``.npy`` file."""
HEADER_BYTES = 10_000
"""Largest header in bytes, which is also NumPy's limit. A header of 64 dimensions has 1,400."""
_DTYPE = r"""['"]descr['"]\s*:\s*['"](?P<dtype>[<>|=]?(?:[biufcSUV]\d{1,9}|[?O]))['"]"""
_ORDER = r"""['"]fortran_order['"]\s*:\s*(?P<order>True|False)"""
_SHAPE = r"""['"]shape['"]\s*:\s*\((?P<shape>(?:\d{1,18}L?(?:,\s*\d{1,18}L?){0,63},?)?)\s*\)"""
_HEADER = re.compile(rf"\{{(?:\s*(?:{_DTYPE}|{_ORDER}|{_SHAPE})\s*,?){{3}}\s*\}}\s*")


@dataclass(frozen=True)
class Header:
    """The header of an array file.

    Attributes:
        fortran_order: whether the first dimension is contiguous.
        offset: bytes before the values.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int

    @property
    def bytes(self) -> int:
        """Size of header and values in bytes; for objects the size of the pointers, which no file contains."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def parse_header(file: IO[bytes]) -> Header:
    """Read the header from the current position of ``file``, and leave the position at the first value.

    Raises:
        ValueError: the header is truncated, not NumPy's, of a format for names beyond Latin-1, or of a dtype with
            fields.
    """
    start = file.tell()
    begin = file.read(len(MAGIC) + 2)
    if not begin.startswith(MAGIC) or len(begin) < len(MAGIC) + 2:
        raise ValueError(f"the magic bytes of numpy's format are missing: it begins with {begin!r}")
    version = (begin[-2], begin[-1])
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it is of numpy's format {version[0]}.{version[1]}, and 1.0 and 2.0 are known")
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if length > HEADER_BYTES:
        raise ValueError(f"its header has {length:,} bytes, and at most {HEADER_BYTES:,} are read")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("EOF within the header: the file is cut off")
    found = _HEADER.fullmatch(text.decode("latin1"))
    if found is None or None in found.groupdict().values():
        raise ValueError(f"its header is not that of a plain array: {text[:80]!r}")
    try:
        dtype = np.dtype(found["dtype"])
    except TypeError as error:
        raise ValueError(f"its header is not that of a plain array: {error}") from error
    shape = tuple(int(size.strip().removesuffix("L")) for size in found["shape"].split(",") if size.strip())
    return Header(dtype, shape, found["order"] == "True", file.tell() - start)


def read_header(path: Path) -> Header:
    """Return the header of a file.

    Raises:
        OSError, ValueError: the file is missing, not a regular file, truncated, or fails :func:`parse_header`.
    """
    with open_file(path) as file:
        return parse_header(file)


def mapped(path: Path) -> NDArray[Any]:
    """Return the memory-mapped array of a file, whose values are read from the disk when they are used.

    Raises:
        OSError, ValueError: see :func:`read_header`; or the values are truncated, or are objects.
    """
    with open_file(path) as file:
        header = parse_header(file)
        size = os.fstat(file.fileno()).st_size
    if header.dtype.hasobject:
        raise ValueError("it is an array of objects, which only a pickle could hold")
    if size < header.bytes:
        raise ValueError(f"it is cut off: it has {size:,} bytes, and its header says {header.bytes:,}")
    order = "F" if header.fortran_order else "C"
    if not math.prod(header.shape) or not header.dtype.itemsize:
        return np.empty(header.shape, header.dtype, order=order)  # type: ignore[call-overload]
    return np.memmap(path, header.dtype, "r", header.offset, header.shape, order)  # type: ignore[call-overload]


def read_npz(path: Path, names: Sequence[str], most: int) -> list[NDArray[Any]]:
    """Return arrays of an ``.npz``.

    Args:
        most: largest size of each array in bytes.

    Raises:
        OSError, ValueError: the file is missing or damaged, or an array is missing, too large or of objects.
    """
    found = []
    try:
        with open_file(path) as file, bounded_zip(file) as archive:
            for name in names:
                with archive.open(f"{name}.npy") as member:
                    header = parse_header(member)
                    if header.dtype.hasobject:
                        raise ValueError(f"Object arrays cannot be read, and {name} is one")
                    if header.bytes > most:
                        raise ValueError(f"its array {name} has {header.bytes:,} bytes, and {most:,} are the limit")
                    content = member.read(header.bytes - header.offset)
                order = "F" if header.fortran_order else "C"
                found.append(np.frombuffer(content, header.dtype).reshape(header.shape, order=order))  # type: ignore[call-overload]
    except KeyError as error:
        raise ValueError(f"it lacks an array: {error}") from error
    except ValueError:
        raise
    except BAD_ZIP as error:
        raise ValueError(f"it is no whole archive of arrays: {error}") from error
    return found
