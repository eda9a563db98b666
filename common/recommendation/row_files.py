"""Rows and their optimizer state in files. Each rank streams its rows, and a run with any other plan can read them.

A rank's ``rows_<rank>.bin`` has for each shard its rows, then their state; ``rows_<rank>.json`` has the offsets. Host
memory is limited to one chunk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError, DataError
from common.recommendation.placement import Hybrid, TableShard
from common.recommendation.row_store import RowStore
from common.recommendation.tables import Tables
from common.untrusted.strict_json import read_json_object

CHUNK_BYTES = 64 << 20
"""Bytes of rows in host memory at a time."""
DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.float32, torch.float64)}
Stored = tuple[RowStore, Tensor | None]
"""A store, and the state of its rows."""


@dataclass(frozen=True)
class _ShardInFile:
    """A shard in a rank's file: its table and index, its number of rows, and the byte offsets of rows and state."""

    table: str
    shard: int
    shards: int
    rows: int
    rows_at: int
    state_at: int


@dataclass(frozen=True)
class _File:
    """A rank's file: dtypes of rows and state (empty: none), width, size in bytes, and its parts."""

    path: Path
    dtype: str
    state: str
    width: int
    size: int
    parts: tuple[_ShardInFile, ...]


def description(tables: Tables) -> dict[str, Any]:
    """Return the description of the tables for a checkpoint, in plain values."""
    return {"width": tables.width, "rows": {table.name: table.rows for table in tables.tables}}


def check_tables(found: Any, tables: Tables) -> None:
    """Refuse a checkpoint of other tables.

    Args:
        found: result of :func:`description` when the checkpoint was written.

    Raises:
        CheckpointError: the tables differ; the message names the first difference.
    """
    expected = description(tables)
    rows = found.get("rows") if isinstance(found, Mapping) else None
    if not isinstance(rows, Mapping) or found.keys() != expected.keys() or not _are_counts([*rows.values()]):
        raise CheckpointError("the checkpoint is of another model: it has no embedding tables")
    if found["width"] != expected["width"]:
        raise CheckpointError(
            f"the checkpoint is of other tables: rows of {found['width']} elements, this run's have {expected['width']}"
        )
    for name in [*expected["rows"], *rows]:
        before, now = rows.get(name), expected["rows"].get(name)
        if before != now:
            has = "no such table" if before is None else f"{before:,} rows"
            wants = "has none" if now is None else f"has {now:,}"
            raise CheckpointError(f"the checkpoint is of other tables: {has} of {name!r}, this run {wants}")


def write(folder: Path, names: Sequence[str], rank: int, stores: Sequence[Stored]) -> None:
    """Write this rank's rows and state durably.

    Args:
        folder: output folder, created if needed.
        stores: stores to write; all of one dtype.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir(exist_ok=True)
    parts: list[_ShardInFile] = []
    path = folder / f"rows_{rank}.bin"
    with path.open("wb") as file:
        for store, state_RW in stores:
            for number, shard in enumerate(store.shards):
                rows_RW, rows_at = store.part(number, store.rows_RW), file.tell()
                _write(file, rows_RW)
                state_at = file.tell()
                if state_RW is not None:
                    _write(file, store.part(number, state_RW))
                parts.append(
                    _ShardInFile(names[shard.table], shard.shard, shard.shards, len(rows_RW), rows_at, state_at)
                )
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    (store, state_RW), *_ = stores
    head = {
        "dtype": str(store.rows_RW.dtype),
        "state": "" if state_RW is None else str(state_RW.dtype),
        "width": store.rows_RW.shape[1],
        "size": size,
        "parts": [asdict(part) for part in parts],
    }
    with path.with_suffix(".json").open("w") as text:
        json.dump(head, text)
        text.flush()
        os.fsync(text.fileno())
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path, tables: Tables, stores: Sequence[Stored]) -> None:
    """Fill this rank's stores and states from the files of all ranks.

    Raises:
        CheckpointError: a file is missing, damaged or of other dtypes, rows are missing, or a number is not finite.
    """
    files = [_opened(path) for path in sorted(folder.glob("rows_*.json"))]
    _check_complete(folder, files, tables)
    for store, state_RW in stores:
        for number, shard in enumerate(store.shards):
            own_state_RW = None if state_RW is None else store.part(number, state_RW)
            name = tables.tables[shard.table].name
            for file in files:
                for part in file.parts:
                    if part.table == name:
                        _read_shard(file, part, shard, store.part(number, store.rows_RW), own_state_RW)
        for number, hybrid in enumerate(store.frequent, len(store.shards)):
            own_state_RW = None if state_RW is None else store.part(number, state_RW)
            name = tables.tables[hybrid.table].name
            for file in files:
                for part in file.parts:
                    if part.table == name:
                        _read_frequent(file, part, hybrid, store.part(number, store.rows_RW), own_state_RW)


def _write(file: BufferedWriter, rows_RW: Tensor) -> None:
    for first, last in _chunks(rows_RW):
        file.write(rows_RW[first:last].cpu().contiguous().numpy().data.cast("B"))


def _chunks(rows_RW: Tensor, rows: int | None = None) -> Iterator[tuple[int, int]]:
    count = len(rows_RW) if rows is None else rows
    step = max(1, CHUNK_BYTES // (rows_RW.shape[1] * rows_RW.element_size()))
    for first in range(0, count, step):
        yield first, min(first + step, count)


def _opened(path: Path) -> _File:
    """Return the description in a rank's JSON file, checked against its data file."""
    try:
        head = read_json_object(path)
        parts = tuple(_ShardInFile(**part) for part in head["parts"])
        counts = [head["width"], head["size"], *(n for part in parts for n in list(asdict(part).values())[1:])]
        if not _are_counts(counts) or not all(part.shards and isinstance(part.table, str) for part in parts):
            raise ValueError("a size that is no whole number")
        file = _File(path.with_suffix(".bin"), head["dtype"], head["state"], head["width"], head["size"], parts)
        size = file.path.stat().st_size
    except (DataError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: unreadable ({error})") from error
    if size != file.size:
        raise CheckpointError(f"{file.path}: {size:,} bytes of {file.size:,}: the file is damaged")
    return file


def _are_counts(values: Sequence[object]) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_complete(folder: Path, files: Sequence[_File], tables: Tables) -> None:
    """Refuse files that do not have every row of every table once."""
    for table in tables.tables:
        parts = [part for file in files for part in file.parts if part.table == table.name]
        shards = sorted(part.shard for part in parts)
        if not parts or shards != list(range(parts[0].shards)) or len({part.shards for part in parts}) > 1:
            raise CheckpointError(
                f"{folder}: incomplete, shards {shards} of table {table.name!r} are there; a rank's file is missing"
            )
        if sum(part.rows for part in parts) != table.rows:
            raise CheckpointError(
                f"{folder}: {sum(part.rows for part in parts):,} rows of table {table.name!r}, this run has "
                f"{table.rows:,}"
            )


def _read_shard(file: _File, part: _ShardInFile, shard: TableShard, rows_RW: Tensor, state_RW: Tensor | None) -> None:
    """Copy the rows that ``part`` and ``shard`` have in common, and their state."""
    if (part.shard - shard.shard) % math.gcd(part.shards, shard.shards):
        return  # they have no rows in common
    for kind, target_RW, dtype, at in _kinds(file, part, rows_RW, state_RW):
        with file.path.open("rb") as stream:
            stream.seek(at)
            for first, last in _chunks(target_RW, part.rows):
                chunk_CW = _read(stream, last - first, file, dtype)
                _check_finite(chunk_CW, kind, file, part)
                key_C = torch.arange(first, last) * part.shards + part.shard
                position_C = (key_C % shard.shards == shard.shard).nonzero().squeeze(1)
                row_C = (key_C[position_C] // shard.shards).to(target_RW.device)
                target_RW.index_copy_(0, row_C, chunk_CW[position_C].to(target_RW.device))


def _read_frequent(file: _File, part: _ShardInFile, hybrid: Hybrid, rows_RW: Tensor, state_RW: Tensor | None) -> None:
    """Copy the frequent rows in ``part``, and their state; other rows are not read."""
    key_R = torch.tensor(hybrid.frequent, dtype=torch.int64)
    row_X = (key_R % part.shards == part.shard).nonzero().squeeze(1)
    row_X = row_X[key_R[row_X].argsort()]  # in the order of the file
    position_X = key_R[row_X] // part.shards
    for kind, target_RW, dtype, at in _kinds(file, part, rows_RW, state_RW):
        with file.path.open("rb") as stream:
            for first, last in _chunks(target_RW, len(row_X)):
                chunk_CW = torch.empty(last - first, file.width, dtype=DTYPES[dtype])
                for row_W, position in zip(chunk_CW, position_X[first:last].tolist(), strict=True):
                    stream.seek(at + position * row_W.nbytes)
                    _read_into(stream, row_W, file)
                _check_finite(chunk_CW, kind, file, part)
                target_RW.index_copy_(0, row_X[first:last].to(target_RW.device), chunk_CW.to(target_RW.device))


def _kinds(
    file: _File, part: _ShardInFile, rows_RW: Tensor, state_RW: Tensor | None
) -> list[tuple[str, Tensor, str, int]]:
    """Return the tensors to fill, rows and state, each with its dtype and byte offset in the file."""
    kinds = [("rows", rows_RW, file.dtype, part.rows_at)]
    if state_RW is not None:
        kinds.append(("state", state_RW, file.state, part.state_at))
    elif file.state:
        raise CheckpointError(f"{file.path}: rows with an optimizer's state, this run's rule has none")
    for kind, target_RW, dtype, _ in kinds:
        if dtype != str(target_RW.dtype) or file.width != target_RW.shape[1]:
            raise CheckpointError(
                f"{file.path}: {kind} of {file.width} elements in {dtype or 'no dtype'}, this run has "
                f"{target_RW.shape[1]} in {target_RW.dtype}"
            )
    return kinds


def _check_finite(chunk_CW: Tensor, kind: str, file: _File, part: _ShardInFile) -> None:
    if not bool(torch.isfinite(chunk_CW).all()):
        raise CheckpointError(
            f"{file.path}: {kind} of table {part.table!r} with numbers that are not finite: the run had "
            "diverged when it was written, or the file was damaged; resume from an earlier checkpoint"
        )


def _read(stream: BufferedReader, rows: int, file: _File, dtype: str) -> Tensor:
    chunk_CW = torch.empty(rows, file.width, dtype=DTYPES[dtype])
    _read_into(stream, chunk_CW, file)
    return chunk_CW


def _read_into(stream: BufferedReader, target: Tensor, file: _File) -> None:
    buffer = target.numpy().data.cast("B")
    if stream.readinto(buffer) != len(buffer):
        raise CheckpointError(f"{file.path}: it ended while it was read")
