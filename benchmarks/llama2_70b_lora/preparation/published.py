"""Read packed rows: parquet files of the reference, or object arrays that NVIDIA converted from them.

``numpy.save`` writes an array of objects as a pickle, which :mod:`common.untrusted.pickled_arrays` parses without
executing code.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from benchmarks.llama2_70b_lora.preparation.packing import LEFT_OUT, PackedExamples
from common.errors import DataError
from common.untrusted.array_file import parse_header
from common.untrusted.pickle_scan import MEMORY, scan
from common.untrusted.pickled_arrays import (
    DAMAGE,
    INTEGERS,
    OBJECTS,
    Admitted,
    ArrayUnpickler,
    PickledArray,
    Refused,
)
from common.untrusted.regular_file import open_file

TIMES_LARGER = 16
"""Memory of lists of integers relative to their pickle: an integer with 3 bytes in the file takes up to 46 bytes."""
_ADMITTED = Admitted("integers", (*INTEGERS, OBJECTS))


def read_object_array(path: Path) -> list[Any]:
    """Return the objects in the 1-D object array of the ``.npy`` file ``path``; they may contain numpy arrays.

    Raises:
        DataError: the file is missing, truncated or damaged, has another kind of array, or its pickle contains
            anything except arrays of integers, dicts and lists. In this case, nothing has been executed.
    """
    try:
        with open_file(path) as file:
            shape = _read_npy_header(file)
            start = file.tell()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                scan(whole, start, memory=MEMORY + TIMES_LARGER * len(whole))
            file.seek(start)
            content = _finished(ArrayUnpickler(file, _ADMITTED).load())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except Refused as error:
        raise DataError(f"{path}: {error}; do not use this file, and ask where it comes from") from error
    except DAMAGE as error:
        raise DataError(f"{path} is damaged, or no object array: {type(error).__name__}: {error}") from error
    if not isinstance(content, list) or len(shape) != 1 or len(content) != shape[0]:
        raise DataError(f"{path} holds no one-dimensional array of objects; its header says {list(shape)}")
    return content


def _read_npy_header(file: BinaryIO) -> tuple[int, ...]:
    """Return the shape of an array of objects; ``file`` is then at the start of the pickle."""
    header = parse_header(file)
    if header.dtype != np.dtype(object):
        raise ValueError(f"its array is of {header.dtype}, not of objects")
    return header.shape


def _finished(content: Any) -> Any:
    """Return ``content`` with each :class:`PickledArray` in lists and dicts replaced by its values."""
    if isinstance(content, PickledArray):
        content = content.values
    if isinstance(content, list):
        return [_in_dict(entry) for entry in content]
    return content


def _in_dict(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {key: value.values if isinstance(value, PickledArray) else value for key, value in entry.items()}


COLUMNS = ("input_ids", "labels")
KEYS = ("input_ids", "loss_mask")


def rows_of_parquet(path: Path, row_length: int) -> PackedExamples:
    """Return the rows of a reference file: ``input_ids``, and ``labels`` that are equal to them or ``LEFT_OUT``.

    Raises:
        DataError: the file cannot be read, lacks a column, or has a row of another length, a value that is not an
            integer, or a wrong label. The message names file and row.
    """
    tokens, scored, before = [], [], 0
    try:
        with parquet.ParquetFile(path) as file:
            if missing := [name for name in COLUMNS if name not in file.schema_arrow.names]:
                raise DataError(f"{path} has no column {missing[0]}; its columns are {file.schema_arrow.names}")
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(COLUMNS))
                ids, labels = (_matrix(path, table[name], before, row_length) for name in COLUMNS)
                wrong = (labels != ids) & (labels != LEFT_OUT)
                if wrong.any():
                    row, column = (int(found[0]) for found in np.nonzero(wrong))
                    raise DataError(
                        f"{path}, row {before + row}: token {column} is {ids[row, column]} and its label "
                        f"{labels[row, column]}, neither the same nor {LEFT_OUT}"
                    )
                tokens.append(_narrow(path, before, ids))
                scored.append(labels != LEFT_OUT)
                before += len(ids)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
    return _joined(tokens, scored, row_length)


def rows_of_object_array(path: Path, row_length: int) -> PackedExamples:
    """Return the rows of an NVIDIA file: dicts with ``input_ids`` and a ``loss_mask`` of 0 and 1.

    Raises:
        DataError: the file cannot be read or contains anything except data; or a row lacks a key, has another length,
            or values that are not integers. The message names file and row.
    """
    tokens, scored = [], []
    for number, entry in enumerate(read_object_array(path)):
        if not isinstance(entry, dict) or any(key not in entry for key in KEYS):
            raise DataError(f"{path}, row {number} is no dict with {' and '.join(KEYS)}")
        ids, mask = (_integers(path, number, key, entry[key], row_length) for key in KEYS)
        if ((mask != 0) & (mask != 1)).any():
            raise DataError(f"{path}, row {number}: loss_mask has values beside 0 and 1")
        tokens.append(_narrow(path, number, ids[None]))
        scored.append(mask[None] == 1)
    return _joined(tokens, scored, row_length)


def check_rows(path: Path, rows: PackedExamples, vocabulary: int, every_token_scored: bool) -> None:
    """Raise :class:`DataError` if a token is outside the vocabulary, or is not scored although it must be.

    Args:
        path: source of the rows, for the error message.
        every_token_scored: whether all tokens must be scored, as in training.
    """
    outside = (rows.tokens < 0) | (rows.tokens >= vocabulary)
    if outside.any():
        row, column = (int(found[0]) for found in np.nonzero(outside))
        raise DataError(
            f"{path}, row {row}: token {rows.tokens[row, column]} lies outside a vocabulary of {vocabulary}"
        )
    if every_token_scored and not rows.scored.all():
        row = int(np.nonzero(~rows.scored)[0][0])
        count = int((~rows.scored[row]).sum())
        raise DataError(
            f"{path}, row {row}: the loss leaves {count} tokens out, and the benchmark trains on all of them"
        )


def _matrix(path: Path, column: pyarrow.ChunkedArray, before: int, row_length: int) -> NDArray[Any]:
    """Return a column of lists as an array (rows, ``row_length``); ``before`` rows of the file precede it."""
    lists = column.combine_chunks()
    if not (pyarrow.types.is_list(lists.type) or pyarrow.types.is_large_list(lists.type) or _fixed(lists.type)):
        raise DataError(f"{path}: its columns hold {lists.type}, not lists of integers")
    if not pyarrow.types.is_integer(lists.type.value_type):
        raise DataError(f"{path}: its lists are of {lists.type.value_type}, not of integers")
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    if wrong := [row for row, length in enumerate(lengths) if length != row_length]:
        raise DataError(f"{path}, row {before + wrong[0]} has {lengths[wrong[0]]} tokens instead of {row_length}")
    flat = lists.flatten()
    if flat.null_count:
        raise DataError(f"{path}: {flat.null_count} tokens are null")
    values: NDArray[Any] = flat.to_numpy(zero_copy_only=False).reshape(-1, row_length)
    return values


def _fixed(kind: pyarrow.DataType) -> bool:
    return bool(pyarrow.types.is_fixed_size_list(kind))


def _integers(path: Path, number: int, key: str, values: Any, row_length: int) -> NDArray[Any]:
    if isinstance(values, list) and not all(type(value) is int or type(value) is bool for value in values):
        raise DataError(f"{path}, row {number}: {key} holds more than integers")
    try:
        array = np.asarray(values, None if isinstance(values, np.ndarray) else np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path}, row {number}: {key} holds no integers ({error})") from error
    if array.ndim != 1 or array.dtype.kind not in "bui":
        raise DataError(f"{path}, row {number}: {key} is no list of integers")
    if len(array) != row_length:
        raise DataError(f"{path}, row {number} has {len(array)} {key} instead of {row_length}")
    return array


def _narrow(path: Path, before: int, ids_RS: NDArray[Any]) -> NDArray[np.int32]:
    """Return ``ids_RS`` as int32; ``before`` rows of the file precede them."""
    outside = (ids_RS < 0) | (ids_RS > np.iinfo(np.int32).max)
    if outside.any():
        row, column = (int(found[0]) for found in np.nonzero(outside))
        raise DataError(f"{path}, row {before + row}: token {ids_RS[row, column]} is of no vocabulary")
    return ids_RS.astype(np.int32)


def _joined(
    tokens: Iterable[NDArray[np.int32]], scored: Iterable[NDArray[np.bool_]], row_length: int
) -> PackedExamples:
    empty = np.empty((0, row_length))
    return PackedExamples(
        np.concatenate([empty.astype(np.int32), *tokens]), np.concatenate([empty.astype(np.bool_), *scored])
    )
