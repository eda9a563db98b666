"""Megatron's indexed files: ``NAME.bin`` has the tokens of all sequences, ``NAME.idx`` their offsets.

``.idx``, little-endian, without padding: nine bytes of magic; version 1 (uint64); dtype code of the tokens (uint8);
number N of sequences (uint64); length D of the document index (uint64); N lengths in tokens (int32); N offsets in
``.bin`` in bytes (int64); D sequence numbers (int64): the first of each document, and N at the end. ``.bin`` has no
header. If every document is one sequence, D is N + 1 and the file has 42 + 20 N bytes.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from common.data import atomic
from common.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
"""Dtype codes of the current Megatron-Core. Codes 6 and 7 are floats, which tokens cannot have."""
SMALL_VOCABULARY = 65500
"""Vocabularies below this size are written as uint16, others as int32."""
_AT_ONCE = 1 << 24  # tokens per chunk in `check_all`


def dtype_for(vocabulary: int) -> np.dtype[Any]:
    """Return the dtype of ``.bin`` for a vocabulary of this size."""
    return DTYPES[8] if vocabulary < SMALL_VOCABULARY else DTYPES[4]


def bin_of(prefix: Path) -> Path:
    """Return the path of the token file of ``prefix``, whose name may contain dots."""
    return prefix.with_name(f"{prefix.name}.bin")


def idx_of(prefix: Path) -> Path:
    """Return the path of the index file of ``prefix``."""
    return prefix.with_name(f"{prefix.name}.idx")


@dataclass(frozen=True)
class Index:
    """The contents of an ``.idx`` file.

    Attributes:
        lengths: int32, (N,): number of tokens of each sequence.
        pointers: int64, (N,): byte offset of each sequence in ``.bin``.
        documents: int64, (D,): first sequence of each document, and N at the end.
    """

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class IndexedTokens:
    """A pair of ``.bin`` and ``.idx``, mapped into memory.

    Attributes:
        prefix: their path without ``.bin`` and ``.idx``.
    """

    prefix: Path
    index: Index
    tokens: NDArray[Any]

    def __len__(self) -> int:
        return len(self.index)

    def sequence(self, number: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return tokens ``start`` to ``stop`` of a sequence; ``stop`` None means its end."""
        first = int(self.index.pointers[number]) // self.index.dtype.itemsize
        length = int(self.index.lengths[number])
        return self.tokens[first + start : first + (length if stop is None else stop)]


class IndexedWriter:
    """Writes documents to ``.bin`` and collects their index; see :func:`indexed_writer`."""

    def __init__(self, file: BinaryIO, vocabulary: int) -> None:
        self.tokens, self.largest = 0, -1
        self.dtype = dtype_for(vocabulary)
        self._file, self._vocabulary = file, vocabulary
        self._lengths, self._documents = array("i"), array("q", [0])

    def add(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append a document of one sequence, or of no sequence if it has no tokens.

        Raises:
            DataError: a token is outside the vocabulary.
        """
        values = np.asarray(tokens, np.int64)
        if len(values):
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= self._vocabulary:
                raise DataError(
                    f"document {len(self._documents) - 1} has token {low if low < 0 else high}, outside a vocabulary "
                    f"of {self._vocabulary}"
                )
            self._file.write(values.astype(self.dtype).tobytes())
            self._lengths.append(len(values))
            self.tokens += len(values)
            self.largest = max(self.largest, high)
        self._documents.append(len(self._lengths))

    @property
    def documents(self) -> int:
        """Number of documents so far."""
        return len(self._documents) - 1

    def write_index(self, path: Path) -> None:
        """Write the ``.idx`` of the added documents."""
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        write_index(path, self.dtype, lengths, np.frombuffer(self._documents, np.int64))


@contextmanager
def indexed_writer(prefix: Path, vocabulary: int) -> Iterator[IndexedWriter]:
    """Write ``prefix.bin`` and ``prefix.idx``; they get their names when the block succeeds, ``.idx`` last.

    If the block fails, only the temporary file of ``prefix.bin`` is left.

    Args:
        prefix: path of the files without ``.bin`` and ``.idx``.
        vocabulary: vocabulary size, which decides the dtype.
    """
    with atomic.written(bin_of(prefix)) as beside, open(beside, "wb") as file:
        writer = IndexedWriter(file, vocabulary)
        yield writer
    writer.write_index(idx_of(prefix))


def write_index(
    path: Path, dtype: np.dtype[Any], lengths: NDArray[np.int32], documents: NDArray[np.int64] | None = None
) -> None:
    """Write an ``.idx`` for sequences that are stored in ``.bin`` one after another.

    Args:
        lengths: number of tokens of each sequence.
        documents: see :attr:`Index.documents`; None if each sequence is one document.
    """
    if documents is None:
        documents = np.arange(len(lengths) + 1, dtype=np.int64)
    code = next(code for code, known in DTYPES.items() if known == dtype)
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= dtype.itemsize
    with atomic.written(path) as beside, open(beside, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
        for values, kind in ((lengths, "<i4"), (pointers, "<i8"), (documents, "<i8")):
            values.astype(kind, copy=False).tofile(file)


def read_index(path: Path) -> Index:
    """Map an ``.idx`` file; its arrays are read when they are used.

    Raises:
        DataError: the file is missing, has another magic, version or dtype, or its size does not match its header.
    """
    remedy = "fetch or prepare it again"
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
            if len(head) < HEADER.size:
                raise DataError(f"{path} has {size} bytes, too few for the header of an index; {remedy}")
            magic, version, code, sequences, documents = HEADER.unpack(head)
            if magic != MAGIC:
                raise DataError(f"{path} begins with {magic!r} where an index has {MAGIC!r}: it is no such file")
            if version != VERSION:
                raise DataError(f"{path} is an index of version {version}; version {VERSION} is known")
            if code not in DTYPES or DTYPES[code].kind == "f":
                raise DataError(f"{path} says dtype {code}, which is none of tokens")
            expected = HEADER.size + 12 * sequences + 8 * documents
            if size != expected:
                raise DataError(
                    f"{path} has {size} bytes where {sequences} sequences and {documents} entries of documents take "
                    f"{expected}; {remedy}"
                )
            whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; {remedy}") from error
    middle = HEADER.size + 4 * sequences
    index = Index(
        DTYPES[code],
        whole[HEADER.size : middle].view("<i4"),
        whole[middle : middle + 8 * sequences].view("<i8"),
        whole[middle + 8 * sequences :].view("<i8"),
    )
    if not documents or index.documents[0] != 0 or index.documents[-1] != sequences:
        raise DataError(f"{path}: its document index does not run from 0 to {sequences} sequences; {remedy}")
    return index


def open_indexed(prefix: Path) -> IndexedTokens:
    """Map both files of ``prefix``. A training run must not call this before ``run_start``.

    Raises:
        DataError: a file is missing or damaged (:func:`read_index`), or the size of ``.bin`` does not match ``.idx``.
    """
    path, index = bin_of(prefix), read_index(idx_of(prefix))
    if not len(index):
        raise DataError(f"{idx_of(prefix)} has no sequences; prepare the data again")
    expected = int(index.pointers[-1]) + int(index.lengths[-1]) * index.dtype.itemsize
    try:
        size = path.stat().st_size
        if size != expected:
            raise DataError(
                f"{path} has {size} bytes where {idx_of(prefix).name} says {expected}: it is "
                f"{'cut off' if size < expected else 'of another index'}; fetch or prepare both again"
            )
        tokens: NDArray[Any] = np.memmap(path, index.dtype, mode="r")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; fetch or prepare it again") from error
    return IndexedTokens(prefix, index, tokens)


def check_all(opened: IndexedTokens, vocabulary: int) -> None:
    """Read both files completely and check them.

    Raises:
        DataError: a sequence is empty or does not start where the previous one ends, the document index decreases, or
            a token is outside ``vocabulary``. The message names the file, and the sequence if there is one.
    """
    index, path = opened.index, idx_of(opened.prefix)
    lengths = np.asarray(index.lengths)
    if (lengths < 1).any():
        number = int(np.argmax(lengths < 1))
        raise DataError(f"{path}: sequence {number} has {lengths[number]} tokens")
    ends = np.cumsum(lengths, dtype=np.int64)
    wrong = index.pointers != (ends - lengths) * index.dtype.itemsize
    if wrong.any():
        number = int(np.argmax(wrong))
        raise DataError(f"{path}: sequence {number} does not begin where the one before it ends; prepare it again")
    if (np.diff(index.documents) < 0).any():
        raise DataError(f"{path}: its document index goes back; prepare it again")
    for first in range(0, len(opened.tokens), _AT_ONCE):
        piece = opened.tokens[first : first + _AT_ONCE]
        outside = (piece >= vocabulary) if piece.dtype.kind == "u" else (piece < 0) | (piece >= vocabulary)
        if outside.any():
            found = first + int(np.argmax(outside))
            number = int(np.searchsorted(ends, found, "right"))
            raise DataError(
                f"{bin_of(opened.prefix)}: sequence {number} has token {opened.tokens[found]}, outside a vocabulary of "
                f"{vocabulary}: another tokenizer made it"
            )


def copy_to_offset(path: Path, target: Path, offset: int) -> None:
    """Copy the file ``path`` into ``target`` at byte ``offset``, and flush it to the disk."""
    with open(path, "rb") as source, open(os.open(target, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.seek(offset)
        shutil.copyfileobj(source, file, 1 << 22)
        file.flush()
        os.fsync(file.fileno())
