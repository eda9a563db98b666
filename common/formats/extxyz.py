"""Extended XYZ files: structures of atoms, one after the other.

A structure is a line with the number of its atoms, a line of properties ``name=value``, with quotes around values with
spaces, and a line for each atom. ``Properties`` describes the columns of these lines, as name, type (S text, R real
number, I integer, L logical) and number of columns, separated by colons; ``Lattice`` has the vectors of the cell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from common.untrusted.regular_file import lines

MOST_ATOMS = 1000
"""Largest structure that is read."""
SYMBOLS = re.findall(
    r"\w+",
    """
    H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo
    Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl
    Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu
    """,
)
"""Symbols of the elements 1 to 94."""
_NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS, 1)}
_LONGEST_LINE = 2**16
_PROPERTY = re.compile(r'(\w+)=(?:"([^"]*)"|(\S+))')
_LOGICAL = {"T": True, "F": False}
_FORMATS: dict[str, Callable[[Any], str]] = {
    "S": lambda number: SYMBOLS[number - 1], "R": "{:.8f}".format, "I": str, "L": lambda value: "T" if value else "F",
}  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """One structure.

    Attributes:
        properties: text of each property.
        cell_33: the rows are the vectors of the cell.
        columns: values of each column or group of columns, (N,) or (N, columns). Symbols of elements, the only texts,
            are atomic numbers.
    """

    properties: dict[str, str]
    cell_33: NDArray[np.float64]
    columns: dict[str, NDArray[Any]]


def encode(frame: Frame, kinds: Mapping[str, str]) -> str:
    """Return the text of a structure.

    Args:
        kinds: its columns, as name to ``type:columns``.
    """
    lattice = " ".join(f"{value:.8f}" for value in frame.cell_33.ravel())
    described = ":".join(f"{name}:{kind}" for name, kind in kinds.items())
    properties = [f'Lattice="{lattice}"', f"Properties={described}", *(f"{k}={v}" for k, v in frame.properties.items())]
    columns = [
        [_FORMATS[kind[0]](value) for value in column]
        for name, kind in kinds.items()
        for column in np.atleast_2d(frame.columns[name].T)
    ]
    rows = [" ".join(row) for row in zip(*columns, strict=True)]
    return "\n".join([str(len(rows)), " ".join(properties), *rows, ""])


def frames(path: Path, file: IO[bytes], wanted: Mapping[str, str]) -> Iterator[Frame]:
    """Yield the structures of an open file.

    Args:
        path: for messages.
        wanted: columns to read, as name to ``type:columns``.

    Raises:
        ValueError: the file is truncated or damaged, has a structure of more than :data:`MOST_ATOMS` atoms, or lacks a
            column.
        KeyError: a structure has no Properties or no Lattice.
        DataError: a line is too long.
    """
    rows = lines(path, file, _LONGEST_LINE)
    for count in rows:
        atoms = int(count)
        if not 1 <= atoms <= MOST_ATOMS:
            raise ValueError(f"{atoms} atoms; 1 to {MOST_ATOMS:,} are expected")
        texts = [row.decode() for _, row in zip(range(atoms + 1), rows, strict=False)]
        if len(texts) < atoms + 1:
            raise ValueError(f"it has {max(0, len(texts) - 1)} of its {atoms} atoms: the file is truncated")
        properties = {name: quoted or plain for name, quoted, plain in _PROPERTY.findall(texts[0])}
        cell_33 = np.array(properties["Lattice"].split(), np.float64).reshape(3, 3)
        yield Frame(properties, cell_33, _columns(properties["Properties"], [row.split() for row in texts[1:]], wanted))


def _columns(described: str, rows: list[list[str]], wanted: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Return the values of the wanted columns by name."""
    fields, first = described.split(":"), 0
    places: dict[tuple[str, str], slice] = {}
    for name, kind, count in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
        places[name, f"{kind}:{count}"] = slice(first, first + int(count))
        first += int(count)
    if any(len(row) != first for row in rows):
        raise ValueError(f"an atom has not {first} columns")
    found = {}
    for name, kind in wanted.items():
        if (name, kind) not in places:
            raise ValueError(f"its Properties have no {name}:{kind}")
        found[name] = _values([row[places[name, kind]] for row in rows], kind)
    return found


def _values(texts: list[list[str]], kind: str) -> NDArray[Any]:
    if kind[0] in "SL":
        known: Mapping[str, int] = _NUMBERS if kind[0] == "S" else _LOGICAL
        unknown = next((text for row in texts for text in row if text not in known), None)
        if unknown is not None:
            raise ValueError(f"{unknown[:10]!r} is no {'element' if kind[0] == 'S' else 'logical value'}")
        values = np.array([[known[text] for text in row] for row in texts])
    else:
        values = np.array(texts, np.float64 if kind[0] == "R" else np.int64)
    return values[:, 0] if kind.endswith(":1") else values
