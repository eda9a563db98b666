"""Reader of TensorFlow's "tensor bundle", the checkpoint format V2, without TensorFlow.

A checkpoint ``P`` is ``P.index`` and one or more ``P.data-00000-of-00001``. The index is a sorted string table as in
LevelDB (doc/table_format.md there): a footer of 48 bytes points to the index block, whose values point to the data
blocks. Entries of a block share prefixes of keys, and a block ends with a byte for its compression and a checksum.
The key "" has a BundleHeaderProto; every other key is a tensor's name and has a BundleEntryProto
(tensorflow/core/protobuf/tensor_bundle.proto) with dtype, shape, data file, offset and checksum.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.errors import CheckpointError
from common.formats.crc32c import masked_crc32c
from common.formats.protobuf import Malformed, fields, messages, piece, varint
from common.untrusted.regular_file import TEXT_BYTES, open_file

_FOOTER_BYTES = 48
_BLOCK_TRAILER_BYTES = 5
_MAGIC = 0xDB4775248B80FB57

_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}
"""Dtype numbers of tensorflow/core/framework/types.proto."""


@dataclass(frozen=True)
class BundleEntry:
    """Position of a tensor: the content of a BundleEntryProto.

    Attributes:
        dtype: TensorFlow's dtype number.
        shard: number of the data file.
        offset, size: position and length in it, in bytes.
        checksum: masked CRC-32C of the bytes; 0 if the entry has none, because the format does not store zeros.
        sliced: whether the tensor is partitioned, and its pieces have separate keys.
    """

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    sliced: bool


def _number(found: dict[int, list[int | bytes]], number: int) -> int:
    """Return the last value of an integer field, 0 if there is none."""
    value = found.get(number, [0])[-1]
    if not isinstance(value, int):
        raise Malformed(f"field {number} is not a number")
    return value


def _block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of the block at ``offset``."""
    if size < 4:
        raise Malformed(f"the block at byte {offset} has {size} bytes")
    stored = piece(table, offset, size + _BLOCK_TRAILER_BYTES)
    if struct.unpack_from("<I", stored, size + 1)[0] != masked_crc32c(stored[: size + 1]):
        raise Malformed(f"the checksum of the block at byte {offset} is wrong")
    if stored[size] != 0:
        raise Malformed(f"the block at byte {offset} is compressed, which TensorFlow's own checkpoints are not")
    restarts = struct.unpack("<I", piece(stored, size - 4, 4))[0]
    end = size - 4 - 4 * restarts
    if end < 0:
        raise Malformed(f"the block at byte {offset} has more restarts than bytes")
    at, key, entries = 0, b"", stored[:end]
    while at < end:
        shared, at = varint(entries, at)
        new, at = varint(entries, at)
        value_size, at = varint(entries, at)
        if shared > len(key):
            raise Malformed("a key shares more than the last one has")
        key = key[:shared] + piece(entries, at, new)
        yield key, piece(entries, at + new, value_size)
        at += new + value_size


def _table(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a sorted string table in order."""
    footer = table[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise Malformed("it does not end as an index does: it is another kind of file, or cut off")
    _, at = varint(footer, 0)
    _, at = varint(footer, at)
    offset, at = varint(footer, at)
    size, at = varint(footer, at)
    for _, handle in _block(table, offset, size):
        first, at = varint(handle, 0)
        length, at = varint(handle, at)
        yield from _block(table, first, length)


def _entry(message: bytes) -> BundleEntry:
    found = fields(message)
    dims = [dim for shape in messages(found, 2) for dim in messages(fields(shape), 2)]
    return BundleEntry(
        dtype=_number(found, 1),
        shape=tuple(_number(fields(dim), 1) for dim in dims),
        shard=_number(found, 3),
        offset=_number(found, 4),
        size=_number(found, 5),
        checksum=_number(found, 6),
        sliced=7 in found,
    )


class TensorBundle:
    """An open checkpoint.

    Args:
        prefix: path of the checkpoint without ``.index``.
        data_prefix: path of the data files without ``.data-00000-of-00001``; default: ``prefix``.

    Raises:
        CheckpointError: a file is missing, cannot be read, or violates the format.
    """

    def __init__(self, prefix: Path, data_prefix: Path | None = None) -> None:
        self._data_prefix = data_prefix or prefix
        self.index = prefix.with_name(prefix.name + ".index")
        try:
            with open_file(self.index) as file:
                table = file.read(TEXT_BYTES + 1)
        except OSError as error:
            raise CheckpointError(
                f"{self.index}: {error.strerror or error}; a TensorFlow checkpoint is named by its path without .index"
            ) from None
        if len(table) > TEXT_BYTES:
            raise CheckpointError(f"{self.index}: not a TensorFlow checkpoint index: larger than {TEXT_BYTES:,} bytes")
        try:
            content = dict(_table(table))
            header = fields(content.pop(b"", b""))
            self.entries = {name.decode(): _entry(entry) for name, entry in content.items()}
            self._shards, big_endian = _number(header, 1), _number(header, 2)
        except (Malformed, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.index}: not a TensorFlow checkpoint index: {error}") from None
        if self._shards < 1 or big_endian:
            reason = "big-endian" if big_endian else "without a header"
            raise CheckpointError(f"{self.index}: not a TensorFlow checkpoint index: it is {reason}")

    def read(self, name: str) -> Tensor:
        """Return one tensor after a check of its checksum.

        Raises:
            CheckpointError: the name is unknown, the dtype is not numeric, or the bytes are missing, truncated, wrong
                or without checksum.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.index}: tensor {name} is missing")
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.index}: tensor {name} has dtype number {entry.dtype}, which is not supported")
        if entry.sliced:
            raise CheckpointError(f"{self.index}: tensor {name} is partitioned, which is not supported")
        if entry.size != math.prod(entry.shape) * dtype.itemsize:
            raise CheckpointError(f"{self.index}: tensor {name} of shape {list(entry.shape)} has {entry.size} bytes")
        if entry.size == 0:
            return torch.empty(entry.shape, dtype=dtype)
        content = self._bytes(name, entry)
        return torch.from_numpy(content).view(dtype).reshape(entry.shape)

    def _bytes(self, name: str, entry: BundleEntry) -> np.ndarray:
        data = self._data_prefix.with_name(f"{self._data_prefix.name}.data-{entry.shard:05d}-of-{self._shards:05d}")
        try:
            with open_file(data) as file:
                size = max(0, min(entry.size, os.fstat(file.fileno()).st_size - entry.offset))
                content = np.fromfile(file, np.uint8, size, offset=entry.offset) if size else np.empty(0, np.uint8)
        except OSError as error:
            raise CheckpointError(f"{data}: {error.strerror or error}; tensor {name} is in it") from None
        if content.size < entry.size:
            raise CheckpointError(
                f"{data}: truncated: tensor {name} is bytes {entry.offset} to {entry.offset + entry.size}, "
                f"the file has {data.stat().st_size}"
            )
        if masked_crc32c(content) != entry.checksum:
            if not entry.checksum:
                raise CheckpointError(
                    f"{self.index}: tensor {name} has no checksum, which TensorFlow always writes; without it nobody "
                    "can check whether the file is complete"
                )
            raise CheckpointError(f"{data}: the checksum of tensor {name} is wrong: the file is damaged")
        return content
