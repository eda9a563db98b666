"""TensorFlow's TFRecord files, with ``tf.train.Example`` as payload, without TensorFlow.

A record is ``uint64 length, uint32 masked CRC-32C of the length, payload, uint32 masked CRC-32C of the payload``,
little-endian (tensorflow/core/lib/io/record_writer.h). A file is a sequence of records, or a gzip stream of one. The
index that DALI reads is a text file with a line ``<offset> <bytes>`` for each record, counted with its frame.

An Example (tensorflow/core/example/example.proto) maps names to features. A feature is a list of byte strings, of
float32 values or of integers: field 1, 2 or 3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.formats.crc32c import masked_crc32c
from common.formats.protobuf import Malformed, encode_field, fields, messages
from common.untrusted.archives import gunzip
from common.untrusted.regular_file import read_text

FRAME_BYTES = 16
"""Bytes of a record beside its payload."""
INDEX_SUFFIX = ".idx"
GZIP_MAGIC = b"\x1f\x8b"

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
_GZIP = 16 + zlib.MAX_WBITS

Extent = tuple[int, int]
"""Offset of a record in bytes, and its size with the frame."""
Feature = bytes | memoryview | NDArray[np.float32]


def frame(payload: bytes) -> bytes:
    """Return ``payload`` as the bytes of one record."""
    length = _LENGTH.pack(len(payload))
    checksums = [_CHECKSUM.pack(masked_crc32c(part)) for part in (length, payload)]
    return b"".join((length, checksums[0], payload, checksums[1]))


def records(data: memoryview, checksums: bool = True) -> Iterator[tuple[int, memoryview]]:
    """Yield offset and payload of every record in ``data``, the content of a file that is not compressed.

    Args:
        checksums: whether to compute the checksum of each payload. The checksum of its length is always compared.

    Raises:
        Malformed: a record is truncated, or a checksum is wrong.
    """
    at = 0
    while at < len(data):
        header = data[at : at + _HEADER_BYTES]
        if len(header) < _HEADER_BYTES:
            raise Malformed(f"the record at byte {at} is truncated: {len(header)} bytes of its header are left")
        if _CHECKSUM.unpack_from(header, _LENGTH.size)[0] != masked_crc32c(bytes(header[: _LENGTH.size])):
            raise Malformed(f"the checksum of the length at byte {at} is wrong: the file is damaged or no TFRecord")
        size = _LENGTH.unpack_from(header)[0]
        if (left := len(data) - at) < size + FRAME_BYTES:
            raise Malformed(
                f"the record at byte {at} is truncated: it has {size + FRAME_BYTES:,} bytes, {left:,} are left"
            )
        payload = data[at + _HEADER_BYTES : at + _HEADER_BYTES + size]
        expected = _CHECKSUM.unpack_from(data, at + _HEADER_BYTES + size)[0]
        if checksums and masked_crc32c(np.frombuffer(payload, np.uint8)) != expected:
            raise Malformed(f"the checksum of the record at byte {at} is wrong: the file is damaged")
        yield at, payload
        at += size + FRAME_BYTES


def pack_example(features: Mapping[str, bytes | NDArray[np.float32]]) -> bytes:
    """Return a ``tf.train.Example``: bytes become a list of one byte string, an array a list of float32 values."""
    entries = []
    for name, value in features.items():
        number, content = (1, value) if isinstance(value, bytes) else (2, value.astype("<f4").tobytes())
        feature = encode_field(number, encode_field(1, content))
        entries.append(encode_field(1, encode_field(1, name.encode()) + encode_field(2, feature)))
    return encode_field(1, b"".join(entries))


def unpack_example(payload: memoryview) -> dict[str, Feature]:
    """Return the features with one byte string, as a view of ``payload``, and those of float32 values.

    Raises:
        Malformed: the payload is not a ``tf.train.Example``.
    """
    found: dict[str, Feature] = {}
    for entries in messages(fields(payload), 1):
        for entry in messages(fields(entries), 1):
            parts = fields(entry)
            names, values = messages(parts, 1), messages(parts, 2)
            if len(names) != 1 or len(values) != 1:
                raise Malformed("an entry of its Example has no name or no feature")
            name, feature = bytes(names[0]).decode("utf-8", "replace"), fields(values[0])
            if texts := messages(feature, 1):
                strings = messages(fields(texts[0]), 1)
                if len(strings) == 1:
                    found[name] = strings[0]
            elif lists := messages(feature, 2):
                found[name] = _floats(lists[0])
    return found


def _floats(message: memoryview) -> NDArray[np.float32]:
    """Return the values of a FloatList, which are packed into one field, or have a field each."""
    content = b""
    for value in fields(message).get(1, []):
        if isinstance(value, int) and value >> 32:
            raise Malformed(f"a float32 value has the bits {value:#x}")
        content += _CHECKSUM.pack(value) if isinstance(value, int) else bytes(value)
    if len(content) % 4:
        raise Malformed(f"a list of float32 values has {len(content)} bytes")
    return np.frombuffer(content, "<f4").astype(np.float32)


def inflate(data: memoryview, most: int) -> bytes:
    """Return the content of a gzip stream.

    Args:
        most: largest size of the content in bytes.

    Raises:
        Malformed: it is damaged or ends early, or its content is larger.
    """
    pieces, size = [], 0
    try:
        for piece in gunzip(data):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise Malformed(f"the gzip data inflate to more than {most:,} bytes")
    except DataError as error:
        raise Malformed(str(error)) from error
    return b"".join(pieces)


def deflate(data: bytes, level: int = 7) -> bytes:
    """Return ``data`` as a gzip stream without time and name; level 7 is that of the published files."""
    stream = zlib.compressobj(level, wbits=_GZIP)
    return stream.compress(data) + stream.flush()


def extents(data: memoryview) -> list[Extent]:
    """Return the extents of all records in the content of a file that is not compressed; raises as :func:`records`."""
    return [(at, len(payload) + FRAME_BYTES) for at, payload in records(data, checksums=False)]


def index_text(found: Sequence[Extent]) -> str:
    """Return the content of the index of a file."""
    return "".join(f"{offset} {size}\n" for offset, size in found)


def check_index(path: Path, found: Sequence[Extent]) -> None:
    """Compare the index at ``path`` with the extents of the records in its file.

    Raises:
        Malformed: it is the index of another file, or no index.
        DataError: it cannot be read.
    """
    lines, expected = read_text(path).split("\n"), index_text(found).split("\n")
    if len(lines) != len(expected):
        raise Malformed(f"{path.name} is the index of another file: it has {len(lines) - 1} records, not {len(found)}")
    for number, (line, wanted) in enumerate(zip(lines, expected, strict=True), 1):
        if line != wanted:
            raise Malformed(f"{path.name} is the index of another file: line {number} is {line[:60]!r}, not {wanted!r}")
