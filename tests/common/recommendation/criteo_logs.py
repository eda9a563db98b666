"""Small days of synthetic click logs as text, and what the benchmarks' definitions make of them, in plain loops."""

from __future__ import annotations

import random
import struct
from datetime import date, timedelta
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

from common.recommendation.criteo.preparation.encoding import Encoding

DAYS, DENSE, FEATURES = 24, 13, 26
HOTNESS = (3, 1, 2, *(1,) * 22, 4)
ROWS = [3 + day % 4 for day in range(DAYS - 1)] + [7]
LARGEST = 9

Line = tuple[int, list[int | None], list[str | None]]


def write_days(folder: Path, seed: int = 0) -> list[list[Line]]:
    """Write 24 files; returns their lines as label, integers and hexadecimal categories, None where one is missing."""
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    categories = [[f"{chance.getrandbits(32):08x}" for _ in range(2 + 5 * k % 31)] for k in range(FEATURES)]
    days = []
    for day, rows in enumerate(ROWS):
        lines: list[Line] = []
        for _ in range(rows):
            integers = [chance.choice([None, -2, -1, 0, 7, 123456]) for _ in range(DENSE)]
            texts = [chance.choice([None, *known]) for known in categories]
            lines.append((chance.randrange(2), integers, texts))
        (folder / f"day_{day}").write_text("".join(map(as_text, lines)))
        days.append(lines)
    return days


def as_text(line: Line) -> str:
    """The line of a file."""
    label, integers, texts = line
    fields = [str(label), *("" if value is None else str(value) for value in integers), *(text or "" for text in texts)]
    return "\t".join(fields) + "\n"


def parquet_table(lines: list[Line]) -> pyarrow.Table:
    """The columns that Criteo's parquet files have, by their names; a field that is missing is a null."""
    columns = {"label": pyarrow.array([label for label, _, _ in lines], pyarrow.int32())}
    for number in range(DENSE):
        values = [integers[number] for _, integers, _ in lines]
        columns[f"integer_feature_{number + 1}"] = pyarrow.array(values, pyarrow.int32())
    for number in range(FEATURES):
        columns[f"categorical_feature_{number + 1}"] = pyarrow.array([texts[number] for _, _, texts in lines], "string")
    return pyarrow.table(columns)


def day_folder(day: int) -> str:
    """The folder of a day of the parquet layout."""
    return f"day={date(2015, 2, 15) + timedelta(day)}"


def part_name(number: int) -> str:
    """The name of a part of a day."""
    return f"part-{number:05d}-99c339d5-0000-4000-8000-000000000000.c000.snappy.parquet"


def write_parquet_days(folder: Path, days: list[list[Line]]) -> None:
    """Write every day as three parts, of which the second has no rows, and the files that Spark leaves beside them."""
    for day, lines in enumerate(days):
        parts = folder / day_folder(day)
        parts.mkdir(parents=True)
        (parts / "_SUCCESS").touch()
        for number, own in ((71, lines[2:]), (9, []), (8, lines[:2])):
            parquet.write_table(parquet_table(own), parts / part_name(number), compression="snappy", row_group_size=1)


def numbered(days: list[list[Line]], first_id: int, modulo: int | None) -> tuple[list[list[list[int]]], list[int]]:
    """The ids of every line of every day, and how many different ones each feature has."""
    known: list[dict[int, int]] = [{} for _ in range(FEATURES)]
    ids = []
    for day in days:
        ids.append([])
        for _, _, texts in day:
            values = [0 if text is None else int(text, 16) for text in texts]
            if modulo is not None:
                values = [value % modulo for value in values]
            for seen, value in zip(known, values, strict=True):
                if value not in seen:
                    seen[value] = first_id + len(seen)
            ids[-1].append([seen[value] for seen, value in zip(known, values, strict=True)])
    return ids, [len(seen) for seen in known]


def multi_hot_tables(rows: list[int], hotness: tuple[int, ...]) -> list[np.ndarray]:
    """The ids of each category of each table, by the published definition."""
    np.random.seed(0)
    tables = []
    for count, hot in zip(rows, hotness, strict=True):
        own = np.arange(count).reshape(-1, 1)
        tables.append(own if hot == 1 else np.hstack([own, np.random.randint(0, count, size=(count, hot - 1))]))
    return tables


def expected_files(days: list[list[Line]], encoding: Encoding) -> tuple[bytes, bytes, list[int]]:
    """Training file, evaluation file and rows of the tables."""
    ids, counts = numbered(days, encoding.first_id, encoding.numbered_modulo)
    rows = [min(count, encoding.largest) for count in counts]
    tables = multi_hot_tables(rows, encoding.hotness)
    logarithms = encoding.sample_format.logarithms
    matrices = []
    for lines, day_ids in zip(days, ids, strict=True):
        matrix = []
        for (label, integers, _), own in zip(lines, day_ids, strict=True):
            present = [value or 0 for value in integers]
            dense = np.log(np.float32([value + 3 for value in present])) if logarithms else np.maximum(present, 0)
            matrix.append([*dense, *own, label])
        matrices.append(matrix)
    # The published set went through a matrix of float32, which the other benchmark's ids never did.
    train = np.array([*chain.from_iterable(matrices[:-1])], np.float32 if encoding.rounded else np.float64)
    np.random.seed(0)
    np.random.shuffle(train)
    last = np.array(matrices[-1], np.float64)
    half = last[: -(-len(last) // 2)]

    def packed(matrix: np.ndarray) -> bytes:
        parts = []
        for row in matrix:
            words = [int(row[-1])]
            form = f"<i13{'f' if logarithms else 'i'}{sum(encoding.hotness)}i"
            words += [float(value) if logarithms else int(value) for value in row[:DENSE]]
            for table, count, own in zip(tables, rows, row[DENSE:-1], strict=True):
                words += table[int(own) % count].tolist()
            parts.append(struct.pack(form, *words))
        return b"".join(parts)

    return packed(train), packed(half), rows


def write_published(folder: Path, days: list[list[Line]], encoding: Encoding) -> None:
    """Write what :func:`expected_files` has as numpy's files of each day: labels, dense features, a zip of ids."""
    train, evaluation, _ = expected_files(days, encoding)
    words = 14 + sum(encoding.hotness)
    both = np.frombuffer(train + evaluation, np.int32).reshape(-1, words)
    folder.mkdir(parents=True)
    first = 0
    for day, rows in enumerate(ROWS):
        own = both[first : first + rows]
        if len(own) < rows:  # the rest of the last day, which nobody reads
            own = np.concatenate([own, np.full((rows - len(own), words), -1, np.int32)])
        np.save(folder / f"day_{day}_labels.npy", own[:, :1])
        np.save(folder / f"day_{day}_dense.npy", np.ascontiguousarray(own[:, 1:14]).view(np.float32))
        ends = 14 + np.cumsum((0, *encoding.hotness))
        members = {str(k): own[:, ends[k] : ends[k + 1]] for k in range(FEATURES)}
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **members)
        first += rows
