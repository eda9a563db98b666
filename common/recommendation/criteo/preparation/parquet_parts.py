"""Days of the log as published on Hugging Face since May 2026: parquet files, about 250 per day.

A day is a folder ``day=2015-02-15`` of files ``part-NNNNN-….parquet``, which are read in the order of their names.
The columns are a label, 13 integers and 26 categories of 8 hexadecimal digits; null means an empty field in the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path

import pyarrow
from pyarrow import parquet

from common.data.stages import Record
from common.errors import DataError
from common.formats.raw_files import listed
from common.recommendation.criteo.preparation.tsv import Lines, Origin, converted
from common.recommendation.criteo.sample_rows import CATEGORICAL, DAYS, DENSE

BATCH_ROWS = 1 << 16
"""Rows that are read at a time."""
INTEGERS = ("label", *(f"integer_feature_{number}" for number in range(1, DENSE + 1)))
CATEGORIES = tuple(f"categorical_feature_{number}" for number in range(1, CATEGORICAL + 1))
COLUMNS = (*INTEGERS, *CATEGORIES)
DAY_FOLDERS = tuple(f"day={date(2015, 2, 15) + timedelta(day)}" for day in range(DAYS))
"""Names of the folders, in the order of the days."""
_REMEDY = "this is no file of Criteo's click logs"


def parts_of(day: Path) -> tuple[Path, ...]:
    """Return the files of a day in order; none if the folder is missing or empty."""
    return tuple(listed(day, "part-*.parquet"))


def day_rows(paths: Sequence[Path]) -> Record:
    """Return the ``rows`` of a day from the files' metadata, and check their columns; read no row.

    Raises:
        DataError: see :func:`read_parts`.
    """
    rows = 0
    for path in paths:
        with _opened(path) as file:
            rows += file.metadata.num_rows
    return {"rows": rows}


def read_parts(paths: Sequence[Path], batch_rows: int = BATCH_ROWS) -> Iterator[Lines]:
    """Yield the rows of a day's files, in batches.

    Raises:
        DataError: a file cannot be read as parquet, lacks a column or has one of another type, or a row is invalid.
    """
    for path in paths:
        row = 1
        with _opened(path) as file:
            for batch in file.iter_batches(batch_rows, columns=list(COLUMNS), use_threads=False):
                if batch.num_rows:
                    origin = Origin(path, row, "row", COLUMNS, _REMEDY)
                    yield converted(origin, _as_of_text(origin, batch))
                    row += batch.num_rows


@contextmanager
def _opened(path: Path) -> Iterator[parquet.ParquetFile]:
    """Open a file, check its columns, and close it after the block, even if that fails.

    Errors from reading it inside the block become a DataError too.
    """
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow)
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())  # it may have several lines
        raise DataError(f"{path}: {reason}; the file is cut off or damaged: delete it and fetch it again") from error


def _check_columns(path: Path, schema: pyarrow.Schema) -> None:
    for name in COLUMNS:
        if (found := schema.names.count(name)) != 1:
            raise DataError(f"{path} has {f'{found} columns' if found else 'no column'} {name}; {_REMEDY}")
        kind = schema.field(name).type
        if name in INTEGERS and not pyarrow.types.is_integer(kind):
            raise DataError(f"{path}: column {name} is {kind}, not int32; {_REMEDY}")
        if name in CATEGORIES and not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{path}: column {name} is {kind}, not string; {_REMEDY}")


def _as_of_text(origin: Origin, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return the columns in order and with the types that reading text gives."""
    columns = []
    for name in COLUMNS:
        column, kind = batch.column(name), pyarrow.int32() if name in INTEGERS else pyarrow.string()
        try:
            column = column if column.type == kind else column.cast(kind)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{origin.path}: column {name}: {error}; {_REMEDY}") from error
        columns.append(column if name in INTEGERS else column.fill_null(""))
    return pyarrow.RecordBatch.from_arrays(columns, names=list(COLUMNS))
