"""Read ``metrics_rank<r>.jsonl``, the trainer's metrics of every step, into columns."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.errors import DataError
from common.report.curves import Floats
from common.report.markup import is_number
from common.untrusted.regular_file import lines, open_regular
from common.untrusted.strict_json import parse_object

METRICS_FILE = re.compile(r"metrics_rank(\d{1,6})\.jsonl")
COLUMNS = (
    "time",
    "samples",
    "loss",
    "step_ms",
    "data_wait_ms",
    "comm_wait_ms",
    "power_w",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "temperature_c",
)
LINE_BYTES = 2**16
"""Largest accepted length of a line; the trainer's lines have a few hundred bytes."""
LARGEST = 1e18
"""Largest accepted absolute value; larger ones mean damage, and their sums could not be drawn."""
BYTES_AT_ONCE = 2**20
MOST_STEPS = 3_000_000
"""Most steps of all ranks of a run, 80 bytes each. ResNet-50 on eight ranks with a batch of 64 has 700,000."""


@dataclass(frozen=True)
class RankSteps:
    """The steps of one rank.

    Attributes:
        columns: values by name, 1-D, one per step; NaN if the line has no value. ``time`` is in seconds since the
            epoch; the names of the others include their unit.
    """

    rank: int
    columns: dict[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["time"])

    def has(self, name: str) -> bool:
        """Return whether any step has a value in the column ``name``."""
        return bool(np.isfinite(self.columns[name]).any())


def read_steps(folder: Path, start: float, stop: float) -> tuple[RankSteps, ...]:
    """Return the steps between ``start`` and ``stop`` of all ranks, in the order of the ranks; omit ranks without any.

    A file may contain steps of a run and of its resumed continuation; their times distinguish them.

    Args:
        folder: output_dir of the run.
        start, stop: seconds since the epoch.

    Raises:
        DataError: a file cannot be read, or a line is damaged (an incomplete last line is ignored).
    """
    numbered = {int(found[1]): path for path in _entries(folder) if (found := METRICS_FILE.fullmatch(path.name))}
    ranks: list[RankSteps] = []
    left = MOST_STEPS
    for rank in sorted(numbered):
        ranks.append(_read_rank(rank, numbered[rank], start, stop, left))
        left -= len(ranks[-1])
    return tuple(rank for rank in ranks if len(rank))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error


def _read_rank(rank: int, path: Path, start: float, stop: float, most: int) -> RankSteps:
    flat = array("d")
    for record in _records(path):
        if "evaluation" in record:  # from a rank that only evaluates
            continue
        # The line of the last step is written, and gets its time, just after run_stop.
        if not start <= _number(record.get("time")) <= stop + 1.0:
            continue
        if len(flat) == most * len(COLUMNS):
            raise DataError(f"{path}: the run has more than {MOST_STEPS:,} steps of all ranks: a report draws no more")
        flat.extend([_number(record.get(name)) for name in COLUMNS])
    table = np.frombuffer(flat, dtype=np.float64).reshape(-1, len(COLUMNS)) if flat else np.empty((0, len(COLUMNS)))
    return RankSteps(rank, {name: table[:, index].copy() for index, name in enumerate(COLUMNS)})


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines as objects. Thousands of lines are parsed at once, which is twice as fast as one at a time."""
    try:
        with open_regular(path) as file:
            number = 0
            while found := _some(path, file, number):
                ended = found if found[-1].endswith(b"\n") else found[:-1]  # the last line is incomplete
                yield from _parse(path, number, ended)
                number += len(found)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _some(path: Path, file: BinaryIO, before: int) -> list[bytes]:
    """Return the next lines of the file, about ``BYTES_AT_ONCE`` in total."""
    found: list[bytes] = []
    size = 0
    for line in lines(path, file, LINE_BYTES, before):
        found.append(line)
        size += len(line)
        if size > BYTES_AT_ONCE:
            break
    return found


def _parse(path: Path, before: int, texts: list[bytes]) -> list[dict[str, Any]]:
    try:
        records = json.loads(b"[" + b",".join(texts) + b"]")
        if len(records) == len(texts) and all(type(record) is dict for record in records):
            return list(records)
    except (ValueError, RecursionError):
        pass
    for number, line in enumerate(texts, start=before + 1):
        try:
            parse_object(line.decode())
        except ValueError as error:
            raise DataError(f"{path}, line {number}: is no record of a step ({error}): {line[:60]!r}") from error
    raise DataError(f"{path}: lines {before + 1} to {before + len(texts)} are no records of steps")


def _number(value: object) -> float:
    return float(value) if is_number(value) and abs(value) <= LARGEST else math.nan
