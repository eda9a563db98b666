"""LMDB files of samples, in the layout of OpenCatalyst: the keys are the decimal indices of samples, and ``length``.

The library maps a file to memory, and reading behind its end would end the process. Therefore the size is compared
with the number of pages before a file is opened. (Source: ``MDB_meta`` in lmdb's mdb.c.)
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Iterable
from pathlib import Path

import lmdb

from common.untrusted.pickle_scan import scan
from common.untrusted.pickled_arrays import DAMAGE, NUMBERS, ArrayUnpickler, Refused
from common.untrusted.regular_file import open_regular

LENGTH = b"length"
"""Key of the number of samples, a pickled integer."""
_THREADS = 64
"""Number of transactions that are kept for later reads."""
LARGEST = 2**40
"""Largest file in bytes."""
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_HEADER = struct.Struct("<16xIIQQI92xQQ")
"""Page with the file's state: magic number, version, address, map size, page size, last page, transaction."""


def write(path: Path, values: Iterable[bytes]) -> int:
    """Write a file with ``values``, in place of an existing one; return their number."""
    path.unlink(missing_ok=True)
    with lmdb.open(str(path), map_size=LARGEST, subdir=False, lock=False, sync=False) as environment:
        count = 0
        with environment.begin(write=True) as transaction:
            for count, value in enumerate(values, 1):
                transaction.put(str(count - 1).encode(), value)
            transaction.put(LENGTH, pickle.dumps(count))
    return count


class LmdbFile:
    """Samples of a file by index; several threads may read.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is truncated, no LMDB file, or has no length.
    """

    def __init__(self, path: Path) -> None:
        _check_size(path)
        try:
            self._environment = lmdb.open(
                str(path), subdir=False, readonly=True, lock=False, readahead=False, max_spare_txns=_THREADS
            )
        except lmdb.Error as error:
            raise ValueError(f"it is damaged: {error}") from error
        try:
            self.length = _number(self._get(LENGTH))
        except ValueError:
            self.close()
            raise

    def read(self, index: int) -> bytes:
        """Return the value of a sample.

        Raises:
            ValueError: the file has no such sample, or is damaged.
        """
        value = self._get(str(index).encode())
        if value is None:
            raise ValueError(f"it has no sample {index}, though its length is {self.length}")
        return value

    def close(self) -> None:
        """Close the file."""
        self._environment.close()

    def _get(self, key: bytes) -> bytes | None:
        try:
            with self._environment.begin() as transaction:
                value: bytes | None = transaction.get(key)
        except lmdb.Error as error:
            raise ValueError(f"it is damaged: {error}") from error
        return value


def _check_size(path: Path) -> None:
    """Compare the size of a file with the pages that it names."""
    with open_regular(path) as file:
        size, content = os.fstat(file.fileno()).st_size, file.read(_HEADER.size)
        if len(content) < _HEADER.size:
            raise ValueError("it is no LMDB file, or truncated")
        magic, version, _, _, page, last, transaction = _HEADER.unpack(content)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError("it is no LMDB file")
        file.seek(page)
        if len(content := file.read(_HEADER.size)) < _HEADER.size:
            raise ValueError("it is truncated")
        *_, other_last, other_transaction = _HEADER.unpack(content)
        pages = 1 + (other_last if other_transaction > transaction else last)
        if size < pages * page:
            raise ValueError(f"it is truncated: {size:,} bytes, and its {pages:,} pages have {pages * page:,}")


def _number(content: bytes | None) -> int:
    """Return the pickled number of samples."""
    if content is None:
        raise ValueError("it has no length: the program that wrote it was interrupted")
    try:
        scan(content)
        number = ArrayUnpickler(io.BytesIO(content), NUMBERS).load()
    except (Refused, *DAMAGE) as error:
        raise ValueError(f"its length is no number: {error}") from error
    if type(number) is not int or number < 0:
        raise ValueError("its length is no number")
    return number
