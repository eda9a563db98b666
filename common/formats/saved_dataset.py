"""Hugging Face data sets that were saved to disk, without the package ``datasets``.

A folder has shards in Arrow's stream format, ``state.json`` with their names in order, and ``dataset_info.json``. Arrow
stores the values of a column of bytes one after the other, uncompressed. So :func:`value_ranges` returns the position
of each value in its file, and a reader fetches single values with ``pread``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from common.errors import DataError
from common.untrusted.strict_json import read_json_object

STATE, INFO = "state.json", "dataset_info.json"
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a complete file in Arrow's stream format."""
_OFFSETS = {pyarrow.binary(): np.int32, pyarrow.large_binary(): np.int64}
_KINDS = {pyarrow.string(): "string", pyarrow.binary(): "binary", pyarrow.int32(): "int32", pyarrow.int64(): "int64"}


def shards_of(folder: Path) -> list[Path]:
    """Return the shards of a data set, in order.

    Raises:
        DataError: ``state.json`` is missing or damaged, names a shard twice, or names a shard that is missing.
    """
    state = folder / STATE
    found = read_json_object(state).get("_data_files")
    entries = found if isinstance(found, list) else []
    given = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    names = [name for name in given if isinstance(name, str) and PurePath(name).name == name]
    if not names or len(names) < len(given):
        raise DataError(f"{state} does not list the files of the data set; fetch it again")
    if len(set(names)) < len(names):
        raise DataError(f"{state} lists {len(names)} files, but only {len(set(names))} different ones; fetch it again")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} lacks {len(missing)} of {len(names)} shards, such as {missing[0]}; fetch them again")
    return [folder / name for name in names]


def value_ranges(path: Path, columns: Sequence[str]) -> NDArray[np.int64]:
    """Return the position of each value of some columns of bytes in a shard. Reads no values.

    Returns:
        (S, len(columns), 2): offset in the file and size, in bytes, for S rows.

    Raises:
        DataError: the file is truncated or damaged, or a column is missing, there twice, compressed, or has other
            values than bytes.
    """
    found = []
    with _opened(path) as (reader, start, size):
        _require(path, reader.schema, columns)
        for name in columns:
            if reader.schema.field(name).type not in _OFFSETS:
                raise DataError(f"{path}: column {name} has {reader.schema.field(name).type}, expected bytes")
        for batch in reader:
            batch.validate(full=True)
            ranges = np.stack([_ranges(batch.column(name), start) for name in columns], 1)
            if batch.num_rows and (ranges.min() < 0 or ranges.sum(2).max() > size):
                raise DataError(f"{path} is compressed or has missing values; fetch it again")
            found.append(ranges)
    return np.concatenate([np.zeros((0, len(columns), 2), np.int64), *found])


def column_values(path: Path, column: str) -> list[Any]:
    """Return the values of a column of numbers or texts in a shard; None for missing values.

    Raises:
        DataError: the file is truncated or damaged, or has no such column, or has it twice.
    """
    with _opened(path) as (reader, _, _):
        _require(path, reader.schema, [column])
        return [value for batch in reader for value in batch.column(column).to_pylist()]


def write_shard(path: Path, schema: pyarrow.Schema, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write a shard and return its number of rows; each row is a record batch.

    Args:
        schema: names and types of the columns.
        rows: values by column; missing ones are null.
    """
    count = 0
    with pyarrow.ipc.new_stream(str(path), schema) as writer:
        for row in rows:
            writer.write_batch(pyarrow.RecordBatch.from_pylist([row], schema))
            count += 1
    return count


def shard_name(number: int, count: int) -> str:
    """Return the name of shard ``number`` of ``count`` shards."""
    return f"data-{number:05d}-of-{count:05d}.arrow"


def write_state(folder: Path, schema: pyarrow.Schema, shards: int) -> None:
    """Write ``state.json`` and ``dataset_info.json`` for ``shards`` shards with the names of :func:`shard_name`."""
    files = [{"filename": shard_name(number, shards)} for number in range(shards)]
    features = {field.name: {"dtype": _KINDS[field.type], "_type": "Value"} for field in schema}
    (folder / STATE).write_text(json.dumps({"_data_files": files, "_split": None}, indent=2), encoding="utf-8")
    (folder / INFO).write_text(json.dumps({"features": features}, indent=2), encoding="utf-8")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[pyarrow.RecordBatchReader, int, int]]:
    """Yield the reader of a shard, the address at which its file is mapped, and the size of the file in bytes."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = os.pread(file.fileno(), len(_END), max(0, size - len(_END)))
        if end != _END:
            raise DataError(f"{path} is cut off, or no file in Arrow's stream format; fetch it again")
        with pyarrow.memory_map(str(path)) as mapped:
            start = mapped.read_buffer(1).address
            mapped.seek(0)
            yield pyarrow.ipc.open_stream(mapped), start, size
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:  # Unicode: names of columns
        raise DataError(f"{path} is damaged, or no file in Arrow's stream format: {error}") from error


def _require(path: Path, schema: pyarrow.Schema, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise DataError(f"{path} has no column {missing[0]}; its columns are {', '.join(schema.names)}")
    twice = [name for name in columns if schema.names.count(name) > 1]
    if twice:
        raise DataError(f"{path} has the column {twice[0]} twice; fetch it again")


def _ranges(column: pyarrow.Array, start: int) -> NDArray[np.int64]:
    """Return (S, 2): offset and size of each value; -1 for missing values."""
    _, ends, values = column.buffers()
    offsets = np.frombuffer(ends, _OFFSETS[column.type])[column.offset : column.offset + len(column) + 1]
    offsets = offsets.astype(np.int64)
    ranges = np.stack([offsets[:-1] + ((values.address if values is not None else start) - start), np.diff(offsets)], 1)
    ranges[~np.asarray(column.is_valid())] = -1
    return ranges
