"""Extended XYZ files: every type of column, and files that are damaged."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError
from common.formats.extxyz import SYMBOLS, Frame, encode, frames

KINDS = {"pos": "R:3", "species": "S:1", "tags": "I:1", "moves": "L:2"}
TEXT = """2
energy=-1.5 Lattice="4.0 0.0 0.0 0.5 5 0 0 0 6.5" Properties=n:I:1:species:S:1:pos:R:3:moves:L:2:tags:I:1 note="a b"
0 Cu 1.0 -2.5 3e-1 T F 2
1 H 0.0 0.0 0.125 F F 0
1
Properties=tags:I:1:pos:R:3:moves:L:2:species:S:1 Lattice="1 0 0 0 1 0 0 0 1"
1 1 2 3 T T Pu
"""


def read(text: str) -> list[Frame]:
    return list(frames(Path("a.extxyz"), io.BytesIO(text.encode()), KINDS))


def test_columns_are_found_by_name_in_any_order():
    first, second = read(TEXT)
    assert first.properties["energy"] == "-1.5"
    assert first.properties["note"] == "a b"
    assert first.cell_33.tolist() == [[4, 0, 0], [0.5, 5, 0], [0, 0, 6.5]]
    assert first.columns["species"].tolist() == [29, 1]
    assert first.columns["pos"].tolist() == [[1, -2.5, 0.3], [0, 0, 0.125]]
    assert first.columns["moves"].tolist() == [[True, False], [False, False]]
    assert first.columns["tags"].tolist() == [2, 0]
    assert second.columns["species"].tolist() == [94]
    assert {name: column.dtype.kind for name, column in second.columns.items()} == {
        "pos": "f", "species": "i", "tags": "i", "moves": "b",
    }  # fmt: skip


def test_elements_have_their_atomic_numbers():
    known = {"H": 1, "O": 8, "Al": 13, "Cu": 29, "Ag": 47, "Pt": 78, "Rn": 86, "Pu": 94}
    assert {symbol: SYMBOLS.index(symbol) + 1 for symbol in known} == known
    assert len(set(SYMBOLS)) == 94


def test_written_structures_are_read_again():
    for frame in read(TEXT):
        frame.properties.clear()
        (found,) = read(encode(frame, KINDS))
        assert np.array_equal(found.cell_33, frame.cell_33)
        for name in KINDS:
            assert np.array_equal(found.columns[name], frame.columns[name])


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("1 H 0.0 0.0 0.125 F F 0\n", "", "an atom has not 8 columns"),
        ("1 1 2 3 T T Pu\n", "", "it has 0 of its 1 atoms: the file is truncated"),
        ("2\n", "two\n", "invalid literal"),
        ("2\n", "0\n", "0 atoms; 1 to 1,000 are expected"),
        ("2\n", "1001\n", "1001 atoms; 1 to 1,000 are expected"),
        ("Cu", "Xx", "'Xx' is no element"),
        ("T F 2", "1 F 2", "'1' is no logical value"),
        ("0.125", "east", "could not convert"),
        (":tags:I:1 ", ":tag:I:1 ", "its Properties have no tags:I:1"),
        ("pos:R:3:moves", "pos:R:2:moves", "an atom has not 7 columns"),
        ("tags:I:1 note", "tags:I note", "zip"),
        ("4.0 0.0 0.0 0.5", "4.0 0.5", "cannot reshape"),
        (" F F 0\n", " F F 0 7\n", "an atom has not 8 columns"),
    ],
)
def test_a_damaged_structure_is_an_error(old, new, complaint):
    assert old in TEXT
    with pytest.raises(ValueError, match=complaint):
        read(TEXT.replace(old, new, 1))


@pytest.mark.parametrize("name", ["Lattice", "Properties"])
def test_a_missing_property_is_named(name):
    with pytest.raises(KeyError, match=name):
        read(TEXT.replace(name, "Other"))


def test_a_line_without_an_end_is_not_read():
    with pytest.raises(DataError, match=r"a\.extxyz, line 2: is longer than 65,536 bytes"):
        read("2\n" + "x" * 100_000)
