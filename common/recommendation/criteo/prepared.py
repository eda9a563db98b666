"""Prepared click logs as a run opens them: the manifest is read and compared with the tables of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.data import manifest
from common.data.manifest import Manifest
from common.errors import DataError
from common.recommendation.criteo.sample_rows import IDS, WORD, SampleFormat
from common.recommendation.tables import Tables
from common.untrusted.strict_json import parse

TABLE_ROWS, HOTNESS = "table_rows", "hotness"
"""Entries of the manifest's source: JSON lists with one number per table."""
FORM = "form"
"""Entry of the manifest's source: the form of the raw data."""


@dataclass(frozen=True)
class PreparedClicks:
    """A prepared data set.

    Attributes:
        table_rows: for each table, a number above all of its ids.
        hotness: for each table, ids per sample.
    """

    folder: Path
    manifest: Manifest
    table_rows: tuple[int, ...]
    hotness: tuple[int, ...]

    @property
    def train_samples(self) -> int:
        """Samples of the training file."""
        return self.manifest.counts["train_samples"]

    @property
    def eval_samples(self) -> int:
        """Samples of the evaluation file."""
        return self.manifest.counts["eval_samples"]

    @property
    def words(self) -> int:
        """Words of a row."""
        return IDS + sum(self.hotness)


def open_prepared(root: Path, sample_format: SampleFormat, tables: Tables | None = None) -> PreparedClicks:
    """Read the manifest, and compare files and tables with it.

    Args:
        tables: tables of the model; None for any.

    Raises:
        DataError: a file is missing or has an incomplete row, the ids belong to other tables, or a table has fewer
            rows than the data have categories.
    """
    found = manifest.read(root, sample_format.name, sample_format.command, ("train_samples", "eval_samples"))
    path, remedy = root / manifest.NAME, f"run '{sample_format.command}'"
    try:
        sizes, hotness = (_numbers(found.source[key]) for key in (TABLE_ROWS, HOTNESS))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} has no valid {error}; {remedy}") from error
    prepared = PreparedClicks(root, found, sizes, hotness)
    for name, count in ((sample_format.train_file, "train_samples"), (sample_format.eval_file, "eval_samples")):
        if name not in found.files:
            raise DataError(f"{path} names no {name}; {remedy}")
        row_bytes, size = prepared.words * WORD, found.files[name].bytes
        if size % row_bytes:
            raise DataError(f"{root / name} has {size:,} bytes, no whole number of rows of {row_bytes}; {remedy}")
        if size // row_bytes != found.counts[count]:
            raise DataError(f"{root / name} has {size // row_bytes:,} rows where {path} says {found.counts[count]:,}")
    if tables is not None:
        _compare(prepared, tables, sample_format.command)
    return prepared


def _compare(prepared: PreparedClicks, tables: Tables, command: str) -> None:
    path = prepared.folder / manifest.NAME
    hotness = tuple(table.hotness for table in tables.tables)
    if hotness != prepared.hotness:
        raise DataError(f"{path} has {list(prepared.hotness)} ids of each table, and the model takes {list(hotness)}")
    for table, rows in zip(tables.tables, prepared.table_rows, strict=True):
        if rows > table.rows:
            largest = max(table.rows for table in tables.tables)
            raise DataError(
                f"{prepared.folder} has category {rows - 1:,} of table {table.name}, which has {table.rows:,} rows "
                f"(benchmark.facts.table_rows): give the scale that the data were prepared for, or the data_dir of "
                f"this one, made by '{command} --table-cap {largest}'"
            )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in parse(text))
