"""MXNet RecordIO: many small payloads in one ``.rec`` file, with a text index ``.idx`` beside it.

A record is ``uint32 magic, uint32 flag << 29 | length, payload, zero padding to 4 bytes``, little-endian, flag 0. If
a payload contains the magic number at a multiple of four bytes, it is split there into several records (flags 1, 2,
..., 3) and the magic is left out, so that scanning for the magic always finds the start of a record. An image payload
starts with ``uint32 flag, float32 label, uint64 id, uint64 id2``; with flag n > 0 the labels are the n float32 values
after that header. A line of the index is ``id <tab> byte offset of the record``. (Format: dmlc-core ``recordio.h``
and MXNet ``recordio.py``.)
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError

MAGIC = 0xCED7230A
MAX_PAYLOAD = (1 << 29) - 1

_MAGIC_BYTES = struct.pack("<I", MAGIC)
_FRAME = struct.Struct("<II")
_IMAGE_HEADER = struct.Struct("<IfQQ")
_WHOLE, _FIRST, _MIDDLE, _LAST = 0, 1, 2, 3


@dataclass(frozen=True)
class ImageRecord:
    """One labelled picture of a RecordIO payload; ``data`` is the encoded picture."""

    record_id: int
    labels: tuple[float, ...]
    data: bytes


def pack_image(record: ImageRecord) -> bytes:
    """Return the payload of ``record``. A single label is stored in the header."""
    if len(record.labels) == 1:
        return _IMAGE_HEADER.pack(0, record.labels[0], record.record_id, 0) + record.data
    header = _IMAGE_HEADER.pack(len(record.labels), 0.0, record.record_id, 0)
    return header + np.asarray(record.labels, "<f4").tobytes() + record.data


def unpack_image(payload: bytes) -> ImageRecord:
    """Return the picture in ``payload``.

    Raises:
        ValueError: the payload is shorter than its header says.
    """
    if len(payload) < _IMAGE_HEADER.size:
        raise ValueError(f"payload of {len(payload)} bytes is shorter than the {_IMAGE_HEADER.size}-byte image header")
    count, label, record_id, _ = _IMAGE_HEADER.unpack_from(payload)
    if count == 0:
        return ImageRecord(record_id, (label,), payload[_IMAGE_HEADER.size :])
    start = _IMAGE_HEADER.size + 4 * count
    if len(payload) < start:
        raise ValueError(f"payload of {len(payload)} bytes is shorter than its {count} labels")
    labels = np.frombuffer(payload, "<f4", count, _IMAGE_HEADER.size)
    return ImageRecord(record_id, tuple(labels.tolist()), payload[start:])


def frame(payload: bytes) -> bytes:
    """Return ``payload`` as the bytes of one record, split where it contains the magic number.

    Raises:
        ValueError: a part is too long for the 29 bits of its length.
    """
    cuts = []
    at = payload.find(_MAGIC_BYTES)
    while at >= 0:
        if at % 4 == 0:
            cuts.append(at)
            at = payload.find(_MAGIC_BYTES, at + 4)
        else:
            at = payload.find(_MAGIC_BYTES, at + 1)
    starts = [0, *(cut + 4 for cut in cuts)]
    ends = [*cuts, len(payload)]
    pieces = []
    for part, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end - start > MAX_PAYLOAD:
            raise ValueError(f"payload of {end - start} bytes is longer than RecordIO's {MAX_PAYLOAD}")
        if not cuts:
            flag = _WHOLE
        elif part == 0:
            flag = _FIRST
        else:
            flag = _LAST if part == len(cuts) else _MIDDLE
        pieces += [_FRAME.pack(MAGIC, flag << 29 | (end - start)), payload[start:end], bytes(-(end - start) % 4)]
    return b"".join(pieces)


class RecordReader:
    """Random access to the records of one ``.rec`` file, in the order of the file.

    Reads only with ``pread``, so that threads and forked processes can share one reader.

    Args:
        idx: path of their index; default: ``rec`` with the suffix ``.idx``.

    Raises:
        DataError: a file is missing, or the index cannot be parsed or has offsets outside of the records.
    """

    def __init__(self, rec: Path, idx: Path | None = None) -> None:
        self.path = Path(rec)
        self.index_path = Path(idx) if idx is not None else self.path.with_suffix(".idx")
        self.ids, self.offsets = _read_index(self.index_path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise DataError(f"{self.path} is missing; run 'mlperf-suite prepare'") from error
        self._size = os.fstat(self._fd).st_size
        outside = np.flatnonzero((self.offsets < 0) | (self.offsets + _FRAME.size > self._size))
        if outside.size:
            first = int(outside[0])
            record = f"record {self.ids[first]} at byte {self.offsets[first]}"
            self.close()
            raise DataError(
                f"{self.index_path}: {record} lies outside of {self.path}, which has {self._size} bytes; "
                "the file is truncated or the index is of another file: prepare it again"
            )
        order = np.argsort(self.offsets, kind="stable")
        self.ids, self.offsets = self.ids[order], self.offsets[order]

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, position: int) -> bytes:
        """Return the payload of the record at ``position`` in the file.

        Raises:
            DataError: the record is truncated, has no magic number, or its parts are out of order.
            IndexError: there is no such record.
        """
        if not 0 <= position < len(self):
            raise IndexError(f"{self.path} has {len(self)} records, none at position {position}")
        start = int(self.offsets[position])
        end = int(self.offsets[position + 1]) if position + 1 < len(self) else self._size
        block = os.pread(self._fd, end - start, start)
        if len(block) < end - start:
            raise self._error(position, f"is truncated: {len(block)} of {end - start} bytes could be read")
        return self._parse(block, position)

    def image(self, position: int) -> ImageRecord:
        """Return the labelled picture at ``position``. Raises as :meth:`read`."""
        try:
            return unpack_image(self.read(position))
        except ValueError as error:
            raise self._error(position, f"is no picture: {error}") from error

    def describe(self, position: int) -> str:
        """Return file, record and offset of ``position``, for messages."""
        return f"{self.path}: record {self.ids[position]} at byte {self.offsets[position]}"

    def end_of(self, position: int) -> int:
        """Return the offset after the record at ``position`` and its padding. Raises as :meth:`read`."""
        return int(self.offsets[position]) + len(frame(self.read(position)))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parse(self, block: bytes, position: int) -> bytes:
        parts: list[bytes] = []
        at = 0
        while True:
            if at + _FRAME.size > len(block):
                raise self._error(position, "is truncated within its frame")
            magic, word = _FRAME.unpack_from(block, at)
            if magic != MAGIC:
                raise self._error(position, f"has 0x{magic:08x} where the magic number 0x{MAGIC:08x} belongs")
            flag, length = word >> 29, word & MAX_PAYLOAD
            if (flag in (_WHOLE, _FIRST)) != (not parts) or flag > _LAST:
                raise self._error(position, f"has a part with continuation flag {flag} after {len(parts)} parts")
            at += _FRAME.size
            if at + length > len(block):
                raise self._error(position, f"is truncated: it says {length} bytes, {len(block) - at} are there")
            parts.append(block[at : at + length])
            at += length + (-length % 4)
            if flag in (_WHOLE, _LAST):
                return _MAGIC_BYTES.join(parts)

    def _error(self, position: int, what: str) -> DataError:
        return DataError(f"{self.describe(position)} {what}; prepare the data again")


class RecordWriter:
    """Writes ``rec`` and its ``.idx`` under temporary names (``.partial``) and renames both when all is written.

    With ``resume`` the complete records of an interrupted writer are kept; ``written`` is their number. If the
    context ends with an exception, the partial files stay for the next attempt.

    Args:
        resume: continue partial files, if there are any, instead of starting over.
    """

    def __init__(self, rec: Path, resume: bool = False) -> None:
        self.path = Path(rec)
        self.index_path = self.path.with_suffix(".idx")
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._partial_index = self.index_path.with_name(self.index_path.name + ".partial")
        self.written = 0
        self._offset = 0
        if resume:
            self._recover()
        if not self.written:
            self._partial.unlink(missing_ok=True)
            self._partial_index.unlink(missing_ok=True)
        self._rec: BinaryIO = open(self._partial, "ab")  # noqa: SIM115
        self._idx: BinaryIO = open(self._partial_index, "ab")  # noqa: SIM115

    def write(self, record_id: int, payload: bytes) -> int:
        """Append one record; return the byte offset at which it starts."""
        block, start = frame(payload), self._offset
        self._rec.write(block)
        self._idx.write(b"%d\t%d\n" % (record_id, start))
        self._offset += len(block)
        self.written += 1
        return start

    def finish(self) -> None:
        """Flush to the disk and rename both files, the index last."""
        for file in (self._rec, self._idx):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._partial.replace(self.path)
        self._partial_index.replace(self.index_path)

    def abandon(self) -> None:
        """Close the partial files and leave them for a later writer with ``resume``."""
        for file in (self._rec, self._idx):
            with contextlib.suppress(OSError):  # a full disk must not hide the first error
                file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def _recover(self) -> None:
        if self.path.exists() and self._partial_index.exists():  # interrupted between the two renames
            self.path.replace(self._partial)
        if not (self._partial.exists() and self._partial_index.exists()):
            return
        text = self._partial_index.read_bytes()
        lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
        size = self._partial.stat().st_size
        while lines and int(lines[-1].split(b"\t")[1]) + _FRAME.size > size:
            lines.pop()
        while lines:
            _truncate(self._partial_index, sum(map(len, lines)))
            with RecordReader(self._partial, self._partial_index) as reader:
                try:
                    end = reader.end_of(len(reader) - 1)
                except DataError:
                    lines.pop()
                    continue
            _truncate(self._partial, end)
            self.written, self._offset = len(lines), end
            return


def _truncate(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)


def _read_index(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    try:
        fields = path.read_bytes().split()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; run 'mlperf-suite prepare'") from error
    try:
        values = np.array(fields, dtype=np.bytes_).astype(np.int64).reshape(-1, 2)
    except ValueError as error:
        raise DataError(f"{path} is no RecordIO index (lines of 'id<tab>offset'): {error}") from error
    return values[:, 0].copy(), values[:, 1].copy()
