"""Records of arrays: their bytes, and values that do not fit."""

import struct

import numpy as np
import pytest

from common.formats.packed_arrays import pack, unpack

FIELDS = {"y": ("<f8", ()), "pos": ("<f4", ("N", 2)), "edges": ("<u2", (2, "E")), "tags": ("u1", ("N",))}
ARRAYS = {"y": 0.1, "pos": [[1.5, -2], [3, 4], [5, 6]], "edges": [[0], [65535]], "tags": np.array([0.0, 2, 255])}
RECORD = struct.pack("<IId6f2H3B", 3, 1, 0.1, 1.5, -2, 3, 4, 5, 6, 0, 65535, 0, 2, 255)


def test_a_record_has_sizes_and_values_one_after_the_other():
    assert pack(ARRAYS, FIELDS) == RECORD


def test_arrays_are_read_with_their_types_and_shapes():
    found = unpack(RECORD, FIELDS)
    assert list(found) == list(FIELDS)
    for name, array in found.items():
        assert array.dtype == np.dtype(FIELDS[name][0])
        assert array.tolist() == np.asarray(ARRAYS[name]).tolist()


def test_axes_of_length_zero_are_kept():
    empty = ARRAYS | {"edges": np.zeros((2, 0))}
    assert unpack(pack(empty, FIELDS), FIELDS)["edges"].shape == (2, 0)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("y", np.inf, "y is not finite"),
        ("pos", np.full((3, 2), np.nan), "pos is not finite"),
        ("pos", np.zeros((3, 3)), r"pos has the shape \(3, 3\), not \(3, 2\)"),
        ("pos", np.zeros(3), r"pos has the shape \(3,\), not \(3, 2\)"),
        ("tags", [1, 2], r"tags has the shape \(2,\), not \(3,\)"),
        ("tags", [0, 1, 256], "tags has numbers that are no uint8"),
        ("tags", [0, 1, 0.5], "tags has numbers that are no uint8"),
        ("edges", [[0], [-1]], "edges has numbers that are no uint16"),
    ],
)
def test_values_that_do_not_fit_are_refused(name, value, complaint):
    with pytest.raises(ValueError, match=complaint):
        pack(ARRAYS | {name: value}, FIELDS)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (RECORD[:7], "it is truncated"),
        (RECORD[:-1], r"it has 46 bytes; with the sizes \{'N': 3, 'E': 1\} it takes 47"),
        (RECORD + b"0", "it has 48 bytes"),
        (struct.pack("<II", 2**32 - 1, 1) + RECORD[8:], "it has 47 bytes; .* it takes 38,654,705,675"),
    ],
    ids=["sizes", "values", "longer", "too many"],
)
def test_a_damaged_record_is_refused(record, complaint):
    with pytest.raises(ValueError, match=complaint):
        unpack(record, FIELDS)
