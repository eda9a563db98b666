"""Intermediate files between the stages: parsed days, and the ids of each categorical feature.

All files are words of 4 bytes without a header. ``heads`` of a day has rows with the label and the dense features, in
their final form. ``raw`` of a day has blocks of lines; each block has the raw numbers of all categorical features,
one feature after the other. ``ids_K`` has the id of feature K of every sample of all days.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.atomic import written
from common.data.stages import Record
from common.errors import DataError
from common.recommendation.criteo.preparation.encoding import LOGARITHM_OFFSET, Encoding
from common.recommendation.criteo.preparation.parquet_parts import read_parts
from common.recommendation.criteo.preparation.tsv import read_lines
from common.recommendation.criteo.sample_rows import CATEGORICAL, IDS, WORD

HEADS, RAW = "heads", "raw"


@dataclass(frozen=True)
class Day:
    """One parsed day.

    Attributes:
        blocks: number of lines of each block.
    """

    folder: Path
    blocks: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of samples."""
        return sum(self.blocks)

    def heads(self, first: int, last: int) -> NDArray[np.int32]:
        """Return labels and dense features of rows ``first`` to ``last``, (last - first, 14)."""
        words = _read(self.folder / HEADS, first * IDS, (last - first) * IDS)
        return words.view(np.int32).reshape(-1, IDS)

    def raw(self, feature: int, at_least: int) -> Iterator[NDArray[np.uint32]]:
        """Yield the raw numbers of a categorical feature in order, about ``at_least`` at a time."""
        gathered: list[NDArray[np.uint32]] = []
        begin = 0
        for rows in self.blocks:
            gathered.append(_read(self.folder / RAW, begin + feature * rows, rows))
            begin += CATEGORICAL * rows
            if sum(map(len, gathered)) >= at_least:
                yield np.concatenate(gathered)
                gathered = []
        if gathered:
            yield np.concatenate(gathered)

    def delete_raw(self) -> None:
        """Delete the raw numbers, when they are no longer needed."""
        (self.folder / RAW).unlink(missing_ok=True)


@dataclass(frozen=True)
class Samples:
    """Samples of all days, concatenated, with one id of each categorical feature."""

    days: tuple[Day, ...]
    folder: Path

    def ids_file(self, feature: int) -> Path:
        """Return the path of a feature's ids."""
        return self.folder / f"ids_{feature}"

    def rows(self, first: int, last: int) -> NDArray[np.int32]:
        """Return samples ``first`` to ``last``: label, dense features, ids; (last - first, 40)."""
        rows = np.empty((last - first, IDS + CATEGORICAL), np.int32)
        begin = 0
        for day in self.days:
            low, high = max(first, begin), min(last, begin + day.rows)
            if low < high:
                rows[low - first : high - first, :IDS] = day.heads(low - begin, high - begin)
            begin += day.rows
        for feature in range(CATEGORICAL):
            rows[:, IDS + feature] = _read(self.ids_file(feature), first, last - first).view(np.int32)
        return rows


def parse_day(files: Sequence[Path], folder: Path, encoding: Encoding) -> Record:
    """Parse a raw day, one text file or several parquet files, into ``folder``; return its ``blocks``.

    Raises:
        DataError: a file is damaged or has a count without logarithm, or the day is empty.
    """
    read = read_parts(files) if files[0].suffix == ".parquet" else read_lines(files[0])
    blocks: list[int] = []
    with ExitStack() as complete:
        partials = [complete.enter_context(written(folder / name)) for name in (HEADS, RAW)]
        with open(partials[0], "wb") as heads, open(partials[1], "wb") as raw:
            for lines in read:
                unusable = np.argwhere(encoding.unusable(lines.counts))
                if len(unusable):
                    row, column = unusable[0]
                    raise lines.origin.fault(
                        int(row),
                        f"has the count {lines.counts[row, column]} as {lines.origin.columns[1 + column]}, and x + "
                        f"{LOGARITHM_OFFSET} of it, whose logarithm is stored, is no positive number of 32 bits",
                    )
                blocks.append(len(lines.labels))
                dense = encoding.dense_words(lines.counts)
                heads.write(np.concatenate([lines.labels[:, None], dense], axis=1).tobytes())
                for categories in lines.categories:
                    raw.write(categories.tobytes())
    if not blocks:
        raise DataError(f"{files[0]}{' and the other parts of this day' if files[1:] else ''}: no samples are in it")
    return {"blocks": blocks}


def parsed(folders: Sequence[Path], records: Sequence[Record]) -> tuple[Day, ...]:
    """Return the days from the records of :func:`parse_day`."""
    return tuple(Day(folder, tuple(record["blocks"])) for folder, record in zip(folders, records, strict=True))


def _read(path: Path, first: int, count: int) -> NDArray[Any]:
    values = np.fromfile(path, np.uint32, count, offset=first * WORD)
    if len(values) != count:
        raise DataError(f"{path} is shorter than it was; prepare into an empty folder")
    return values
