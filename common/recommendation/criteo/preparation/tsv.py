"""Days of the log as text: lines of a label, 13 integers and 26 hexadecimal categories.

Fields are separated by tabs. All but the label may be empty, which counts as 0. Integers may be negative; categories
are unsigned 32-bit numbers. The last line of a day may lack its line feed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from common.errors import DataError
from common.recommendation.criteo.sample_rows import CATEGORICAL, DENSE

BLOCK_BYTES = 16 << 20
"""Bytes of text that are parsed at a time."""
DIGITS = 8
"""Largest number of hexadecimal digits of a category."""
_DIGITS_OF = np.full(256, 255, np.uint8)
for _value, _digits in enumerate(zip(b"0123456789abcdef", b"0123456789ABCDEF", strict=True)):
    _DIGITS_OF[list(_digits)] = _value

LABEL = "label"
INTEGERS = tuple(f"I{number}" for number in range(1, DENSE + 1))
CATEGORIES = tuple(f"C{number}" for number in range(1, CATEGORICAL + 1))
COLUMNS = (LABEL, *INTEGERS, *CATEGORIES)


SAMPLE = (
    "The files day_0.gz to day_23.gz that stood on Hugging Face until May 2026 are an 11 % sample of about 20 million "
    "rows a day, and another transfer gives the same; take the parquet files that replaced them, or a whole copy of "
    "the text"
)
"""Explanation for an incomplete day of text, for messages."""


@dataclass(frozen=True)
class Origin:
    """Source of some lines, for messages.

    Attributes:
        first: number of the first of the lines in the file, from 1.
        unit: unit of the file: line or row.
        columns: names of the 40 columns.
        remedy: what to do about a wrong line.
    """

    path: Path
    first: int
    unit: str
    columns: Sequence[str]
    remedy: str

    def fault(self, line: int, problem: str) -> DataError:
        """Return the error for a line, counted from 0 among these lines; ``problem`` describes what is wrong."""
        return DataError(f"{self.path}: {self.unit} {self.first + line:,} {problem}; {self.remedy}")


@dataclass(frozen=True)
class Lines:
    """N lines of a day.

    Attributes:
        labels: int32, (N,), 0 or 1.
        counts: int32, (N, 13).
        categories: uint32, 26 arrays (N,).
    """

    origin: Origin
    labels: NDArray[np.int32]
    counts: NDArray[np.int32]
    categories: tuple[NDArray[np.uint32], ...]


def read_lines(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[Lines]:
    """Yield the lines of a day, a block of text at a time; gzip (``.gz``) is supported.

    Raises:
        DataError: the file cannot be read, or a line is invalid.
    """
    types = {LABEL: pyarrow.int32(), **dict.fromkeys(INTEGERS, pyarrow.int32())}
    types |= dict.fromkeys(CATEGORIES, pyarrow.string())
    line, remedy = 1, "fetch it again"
    try:
        batches = arrow_csv.open_csv(
            path,
            arrow_csv.ReadOptions(use_threads=False, block_size=block_bytes, column_names=COLUMNS),
            arrow_csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            arrow_csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
        )
        for batch in batches:
            yield converted(Origin(path, line, "line", COLUMNS, remedy), batch)
            line += batch.num_rows
    except (OSError, pyarrow.ArrowInvalid) as error:
        if path.suffix == ".gz" and not isinstance(error, pyarrow.ArrowInvalid):
            remedy = f"the file is not whole. {SAMPLE}"
        raise DataError(f"{path}, behind line {line - 1:,}: {error}; {remedy}") from error


def converted(origin: Origin, batch: pyarrow.RecordBatch) -> Lines:
    """Convert a batch of the 40 columns, numbers as int32 and categories as strings, to lines.

    Raises:
        DataError: a label is missing or neither 0 nor 1, or a category is not a hexadecimal number.
    """
    numbers = [batch.column(position) for position in range(1 + DENSE)]
    if numbers[0].null_count:
        raise origin.fault(int(np.flatnonzero(np.asarray(numbers[0].is_null()))[0]), "has no label")
    labels, *counts = (np.asarray(column.fill_null(0)) for column in numbers)
    if labels.min() < 0 or labels.max() > 1:
        wrong = int(np.flatnonzero((labels < 0) | (labels > 1))[0])
        raise origin.fault(wrong, f"has the label {labels[wrong]}, not 0 or 1")
    categories = []
    for position in range(1 + DENSE, 1 + DENSE + CATEGORICAL):
        values, wrong_rows = hexadecimal(batch.column(position))
        if len(wrong_rows):
            row = int(wrong_rows[0])
            text = batch.column(position).cast(pyarrow.binary())[row].as_py().decode("utf-8", "backslashreplace")
            raise origin.fault(
                row, f"has {text!r} as {origin.columns[position]}, no number of up to {DIGITS} hexadecimal digits"
            )
        categories.append(values)
    return Lines(origin, labels, np.stack(counts, axis=1), tuple(categories))


def hexadecimal(texts: pyarrow.StringArray) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the values of hexadecimal texts, 0 for empty ones, and the indices of invalid texts."""
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    if data is None or bounds[-1] == bounds[0]:
        return np.zeros(len(texts), np.uint32), np.zeros(0, np.int64)
    digits = _DIGITS_OF[np.frombuffer(data, np.uint8)]
    lengths, ends = np.diff(bounds), bounds[1:]
    values, wrong = np.zeros(len(texts), np.uint32), lengths > DIGITS
    for back in range(DIGITS, 0, -1):
        there = lengths >= back
        digit = np.where(there, digits[np.maximum(ends - back, 0)], 0)
        wrong |= digit > 15
        values = (values << np.uint32(4)) | digit
    return values, np.flatnonzero(wrong)
