"""Headers of safetensors files: names, dtypes, shapes and offsets of the tensors.

A file is 8 bytes with the header's length, little-endian, the header in JSON, and the tensors' bytes one after the
other (https://github.com/huggingface/safetensors, "Format"). Reading only the headers takes milliseconds and shows
which tensors a checkpoint of hundreds of gigabytes has, and whether its files are complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, DataError
from common.untrusted.regular_file import open_regular
from common.untrusted.strict_json import FILE_ENTRIES, parse

HEADER_LIMIT = 16 * 2**20
"""Largest header in bytes. A file of 10,000 tensors has a header of 1.2 MB; the format allows 100 MB."""
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class TensorLocation:
    """Position of one tensor in a file.

    Attributes:
        dtype: the format's name, such as ``BF16``.
        start, end: byte range in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Return the tensors of ``path`` by name; read only the header.

    Raises:
        CheckpointError: the file is missing, truncated, or of another format; the message names it.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
                raise CheckpointError(f"{path} is cut off, or no safetensors file: its header is longer than the file")
            if length > HEADER_LIMIT:
                raise CheckpointError(f"{path} has a header of {length:,} bytes, and at most {HEADER_LIMIT:,} are read")
            content = parse(file.read(length).decode("utf-8"), FILE_ENTRIES)
        first = _LENGTH_BYTES + length
        found = {name: _location(path, first, entry) for name, entry in content.items() if name != _METADATA}
    except DataError as error:
        raise CheckpointError(f"{error}" if path.exists() else f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file ({type(error).__name__}: {error})") from error
    for name, location in found.items():
        if location.end > size:
            raise CheckpointError(
                f"{path} is cut off: it has {size} bytes, and {name} ends at {location.end}; fetch it again"
            )
    return found


def _location(path: Path, first: int, entry: dict[str, Any]) -> TensorLocation:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("a shape or an offset that is no whole number")
    if end - start != math.prod(shape) * _BYTES[entry["dtype"]]:
        raise ValueError(f"{end - start} bytes for {entry['dtype']} of shape {list(shape)}")
    return TensorLocation(path, entry["dtype"], shape, first + start, first + end)
