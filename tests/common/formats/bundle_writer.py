"""Writer of TensorFlow's tensor bundles for tests. It shares no code with the reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

DTYPE_NUMBERS = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}


def _of_byte(register: int) -> int:
    for _ in range(8):
        register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register


_TABLE = [_of_byte(byte) for byte in range(256)]


def checksum(data: bytes) -> bytes:
    """Masked CRC-32C, byte by byte."""
    register = 0xFFFFFFFF
    for byte in data:
        register = register >> 8 ^ _TABLE[register & 0xFF ^ byte]
    crc = register ^ 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    """A protocol buffer field with an integer."""
    return varint(field << 3) + varint(value)


def nested(field: int, message: bytes) -> bytes:
    """A protocol buffer field with bytes."""
    return varint(field << 3 | 2) + varint(len(message)) + message


class Index:
    """Blocks of a sorted string table under construction."""

    def __init__(self) -> None:
        self.content = b""

    def block(self, entries: list[tuple[bytes, bytes]], compression: int = 0, restart_interval: int = 16) -> bytes:
        """Append a block; returns its handle."""
        body, restarts, last = b"", [], b""
        for number, (key, value) in enumerate(entries):
            shared = 0
            if number % restart_interval == 0:
                restarts.append(len(body))
            else:
                while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                    shared += 1
            body += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
            last = key
        body += b"".join(struct.pack("<I", offset) for offset in restarts or [0])
        body += struct.pack("<I", len(restarts or [0]))
        handle = varint(len(self.content)) + varint(len(body))
        stored = body + bytes([compression])
        self.content += stored + checksum(stored)
        return handle


def write_bundle(
    prefix: Path,
    tensors: Mapping[str, np.ndarray],
    shards: int = 1,
    dtypes: Mapping[str, int] | None = None,
    checksums: bool = True,
    compression: int = 0,
    block_entries: int = 7,
    header: bytes | None = None,
    extra: bytes = b"",
) -> None:
    """Write ``tensors`` as the checkpoint ``prefix``.

    Args:
        prefix: path without ``.index``.
        shards: number of data files, which get the tensors in turn.
        dtypes: wrong dtype numbers, by the name of the tensor.
        checksums: whether entries have checksums.
        compression: compression byte of the blocks, which are not compressed.
        block_entries: number of entries of a data block.
        header: wrong BundleHeaderProto.
        extra: additional fields of every entry.
    """
    data = [b""] * shards
    right = number(1, shards) + nested(3, number(1, 1))
    entries = [(b"", right if header is None else header)]
    for position, name in enumerate(sorted(tensors)):
        array, shard = np.ascontiguousarray(tensors[name]).reshape(np.shape(tensors[name])), position % shards
        content = array.tobytes()
        dtype = (dtypes or {}).get(name, DTYPE_NUMBERS[array.dtype.name])
        entry = number(1, dtype) + nested(2, b"".join(nested(2, number(1, size)) for size in array.shape))
        entry += number(3, shard) + number(4, len(data[shard])) + number(5, len(content))
        if checksums:
            entry += varint(6 << 3 | 5) + checksum(content)
        entries.append((name.encode(), entry + extra))
        data[shard] += content
    index = Index()
    handles = []
    for first in range(0, len(entries), block_entries):
        block = entries[first : first + block_entries]
        handles.append((block[-1][0], index.block(block, compression)))
    directory = index.block([])
    contents = index.block(handles, restart_interval=1)
    footer = (directory + contents).ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
    prefix.with_name(prefix.name + ".index").write_bytes(index.content + footer)
    for shard, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}").write_bytes(content)
