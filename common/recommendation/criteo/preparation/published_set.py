"""Conversion of the published multi-hot data set (``.npy`` files), whose training days are already shuffled."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.row_output import RowOutput
from common.data.stages import Record
from common.errors import DataError
from common.formats import npy
from common.recommendation.criteo.sample_rows import DENSE, IDS
from common.untrusted.archives import BAD_ZIP, bounded_zip
from common.untrusted.array_file import parse_header
from common.untrusted.regular_file import open_regular

_LOCAL_HEADER = 30
"""Bytes before the name of a member of a zip file; the last two numbers are the lengths of name and extra field."""


def day_rows(files: Sequence[Path]) -> Record:
    """Return the ``rows`` of a day, and check dtypes and shapes of labels and dense features.

    Raises:
        DataError: a file is damaged, or the numbers of samples differ.
    """
    labels, dense = _array(files[0], "<i4", 1), _array(files[1], "<f4", DENSE)
    if len(labels) != len(dense):
        raise DataError(f"{files[0]} has {len(labels):,} rows and {files[1].name} {len(dense):,}; fetch them again")
    return {"rows": len(labels)}


def convert_block(
    files: Sequence[Path],
    first: int,
    last: int,
    output: RowOutput,
    position: int,
    table_rows: Sequence[int],
    hotness: Sequence[int],
) -> Record:
    """Write samples ``first`` to ``last`` of a day to rows of ``output`` from ``position`` on.

    Args:
        files: files of the day: labels, dense features, ids.
        position: row of ``output`` for the first sample.
        table_rows, hotness: rows and ids per sample of each table.

    Raises:
        DataError: a file is damaged, a label is neither 0 nor 1, a dense feature is not finite, or an id is outside
            its table.
    """
    rows = np.empty((last - first, IDS + sum(hotness)), np.int32)
    rows[:, :1] = _array(files[0], "<i4", 1)[first:last]
    rows[:, 1:IDS] = np.ascontiguousarray(_array(files[1], "<f4", DENSE)[first:last]).view(np.int32)
    if rows[:, 0].min() < 0 or rows[:, 0].max() > 1:
        raise DataError(f"{files[0]}: among rows {first:,} to {last:,} are labels that are neither 0 nor 1")
    if not np.isfinite(rows[:, 1:IDS].view(np.float32)).all():
        raise DataError(f"{files[1]}: among rows {first:,} to {last:,} are dense features that are not finite")
    column = IDS
    for table, (most, hot) in enumerate(zip(table_rows, hotness, strict=True)):
        ids = _member(files[2], table, hot)[first:last]
        if len(ids) != last - first:
            raise DataError(f"{files[2]}: member {table} has fewer rows than {files[0].name}; fetch it again")
        if ids.min() < 0 or ids.max() >= most:
            row = int(np.flatnonzero(((ids < 0) | (ids >= most)).any(axis=1))[0])
            wrong = ids[row][(ids[row] < 0) | (ids[row] >= most)][0]
            raise DataError(
                f"{files[2]}: row {first + row:,} has category {wrong:,} of table C{table + 1}, of {most:,} rows"
            )
        rows[:, column : column + hot] = ids
        column += hot
    output.write(position, rows)
    return {"rows": last - first}


def _array(path: Path, dtype: str, width: int) -> NDArray[Any]:
    try:
        header = npy.read_header(path)
        array = npy.mapped(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no whole file of numpy's: {error}; fetch it again") from error
    if header.dtype.str != dtype or (header.fortran_order and width > 1) or array.shape[1:] != (width,):
        raise DataError(f"{path} holds {header.dtype.str} {header.shape} and not {dtype} (samples, {width})")
    return array


def _member(path: Path, table: int, hot: int) -> NDArray[Any]:
    """Return the ids of a table, (samples, hot), mapped from their position in the zip file."""
    try:
        with open_regular(path) as packed, bounded_zip(packed) as archive:
            info = archive.getinfo(f"{table}.npy")
        if info.compress_type != zipfile.ZIP_STORED:
            raise DataError(f"{path}: member {table} is compressed; the published set is not")
        with open_regular(path) as file:
            file.seek(info.header_offset)
            name, extra = struct.unpack("<2H", file.read(_LOCAL_HEADER)[-4:])
            file.seek(info.header_offset + _LOCAL_HEADER + name + extra)
            header = parse_header(file)
            if header.dtype.str != "<i4" or header.fortran_order or header.shape[1:] != (hot,):
                raise DataError(
                    f"{path}: member {table} holds {header.dtype.str} {header.shape} and not <i4 (samples, {hot})"
                )
            if header.bytes > info.file_size:
                raise ValueError("an array that is larger than its member")
            return np.memmap(path, np.int32, "r", file.tell(), header.shape)
    except (OSError, KeyError, *BAD_ZIP) as error:
        raise DataError(f"{path} is no whole set of {table + 1} or more arrays: {error}; fetch it again") from error
