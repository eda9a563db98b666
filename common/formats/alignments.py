"""Alignments of protein sequences: A3M, Stockholm, and the hits of HHsearch (HHR).

In A3M, all rows have the query's columns as upper-case letters and ``-``; lower-case letters are insertions between
them. Stockholm has all columns for every row, in one or more blocks. (Sources: HH-suite's user guide; HMMER's user
guide.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_COLUMNS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ-")
_INSERTIONS = frozenset(b"abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True)
class Alignment:
    """Rows of an alignment, in the query's columns.

    Attributes:
        letters: (rows, columns) uint8, ASCII of upper-case letters and ``-``.
        deletions: (rows, columns) int32, number of letters that are left out before each column.
    """

    letters: NDArray[np.uint8]
    deletions: NDArray[np.int32]


def read_a3m(content: bytes) -> Alignment:
    """Return the rows of an A3M file; an empty file has none.

    Raises:
        ValueError: a row has another number of columns than the first one, or other characters than letters and ``-``.
    """
    rows: list[bytes] = []
    for entry in (b"\n" + content.replace(b"\r", b"")).split(b"\n>")[1:]:
        _, _, lines = entry.partition(b"\n")
        rows.append(lines.replace(b"\n", b"").replace(b".", b""))  # HH-suite may fill insertions of other rows with .
    if not rows:
        if content.strip():
            raise ValueError("it has no row that starts with >")
        return Alignment(np.zeros((0, 0), np.uint8), np.zeros((0, 0), np.int32))
    text = np.frombuffer(b"".join(rows), np.uint8)
    kept = _table(_COLUMNS)[text]
    unknown = ~(kept | _table(_INSERTIONS)[text])
    if unknown.any():
        raise ValueError(f"it has the character {chr(text[unknown][0])!r}")
    ends = np.cumsum([len(row) for row in rows])
    places = np.flatnonzero(kept)
    counts = np.diff(np.searchsorted(places, ends), prepend=0)
    columns = int(counts[0])
    if (wrong := np.flatnonzero(counts != columns)).size:
        raise ValueError(f"row {wrong[0] + 1} has {counts[wrong[0]]} columns, the first one {columns}")
    before = np.empty_like(places)
    before[1:] = places[:-1]
    if columns:
        before[::columns] = np.concatenate([[0], ends[:-1]]) - 1  # insertions behind the last column do not count
    shape = len(rows), columns
    return Alignment(text[places].reshape(shape), (places - before - 1).astype(np.int32).reshape(shape))


def _table(characters: frozenset[int]) -> NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[sorted(characters)] = True
    return table


def stockholm_to_a3m(text: str) -> str:
    """Return a Stockholm alignment as A3M; its first row is the query, whose gaps are insertions of other rows.

    Raises:
        ValueError: it has no rows, or rows of different lengths.
    """
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith(("#", "//")):
            name, _, part = line.strip().partition(" ")
            rows.setdefault(name, []).append(part.strip())
    joined = {name: "".join(parts).replace(".", "-") for name, parts in rows.items()}
    if not joined:
        raise ValueError("it has no rows")
    query = next(iter(joined.values()))
    written = []
    for name, row in joined.items():
        if len(row) != len(query):
            raise ValueError(f"row {name[:40]!r} has {len(row)} columns, the first one {len(query)}")
        letters = (
            letter.upper() if column != "-" else letter.lower() if letter != "-" else ""
            for letter, column in zip(row, query, strict=True)
        )
        written.append(f">{name}\n{''.join(letters)}\n")
    return "".join(written)


@dataclass(frozen=True)
class Hit:
    """One hit of HHsearch.

    Attributes:
        name: first word of the hit's description, such as ``1abc_A``.
        sum_probs: expected number of correctly aligned pairs.
        query, template: aligned rows, with ``-`` for gaps, of equal length.
        query_index, template_index: position in its sequence (from 0) of each column, -1 for gaps.
    """

    name: str
    sum_probs: float
    query: str
    template: str
    query_index: NDArray[np.int64]
    template_index: NDArray[np.int64]

    @property
    def aligned(self) -> int:
        """Number of columns in which neither row has a gap."""
        return int(((self.query_index >= 0) & (self.template_index >= 0)).sum())


_MOST_RESIDUES = 2**31
"""Largest length of a sequence in an HHR file."""
_SUM_PROBS = re.compile(r"Sum_probs=(\S+)")
_ROW = re.compile(r"([QT]) (\S+)\s+(\d+)\s+([A-Za-z-]+)\s+(\d+) \((\d+)\)")
_SKIPPED = ("Consensus", "ss_pred", "ss_dssp", "ss_conf")


def read_hhr(text: str) -> list[Hit]:
    """Return the hits of an HHR file, in its order; an empty file has none.

    Raises:
        ValueError: the file does not begin with its query. A hit has no description, no score or no rows, its rows do
            not match, or a position is out of range.
    """
    if text.strip() and not text.startswith("Query "):
        raise ValueError("it does not begin with Query")
    parts = re.split(r"^No +(\d+)\s*$", text, flags=re.MULTILINE)
    return [_hit(int(number), part) for number, part in zip(parts[1::2], parts[2::2], strict=True)]


def _hit(number: int, text: str) -> Hit:
    description = re.search(r"^>(\S+)", text, re.MULTILINE)
    score = _SUM_PROBS.search(text)
    if description is None or score is None:
        raise ValueError(f"hit {number} has no description or no Sum_probs")
    rows: dict[str, Any] = {"Q": "", "T": ""}
    starts: dict[str, int] = {}
    for line in text.splitlines():
        match = _ROW.match(line)
        if match is None or match[2].startswith(_SKIPPED):
            continue
        side, _, first, letters, last, _ = match.groups()
        begun = starts.setdefault(side, int(first) - 1) + _letters(rows[side])
        rows[side] += letters.upper()
        if begun != int(first) - 1 or starts[side] + _letters(rows[side]) != int(last):
            raise ValueError(f"hit {number}: the row {line.strip()[:40]!r} does not go on where the last one ended")
        if not 1 <= int(first) <= int(last) + 1 <= _MOST_RESIDUES:
            raise ValueError(f"hit {number}: the row {line.strip()[:40]!r} is not within {_MOST_RESIDUES:,} residues")
    if not rows["Q"] or len(rows["Q"]) != len(rows["T"]):
        raise ValueError(f"hit {number} has {len(rows['Q'])} columns of the query and {len(rows['T'])} of the template")
    indices = {side: _indices(rows[side], starts[side]) for side in "QT"}
    return Hit(description[1], float(score[1]), rows["Q"], rows["T"], indices["Q"], indices["T"])


def _letters(row: str) -> int:
    return len(row) - row.count("-")


def _indices(row: str, first: int) -> NDArray[np.int64]:
    letter = np.array([character != "-" for character in row])
    return np.where(letter, first + np.cumsum(letter) - 1, -1)
