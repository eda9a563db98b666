"""Rows of flat files: values and order against numpy, and files that are not what they should be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.data.aligned_buffers import ALIGNMENT
from common.data.direct_rows import DirectRows, RowPiece
from common.errors import DataError

ROWS = 500
PIECE = 4 * ALIGNMENT


def made(shape: tuple[int, ...], kind: type[np.generic]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 100, shape).astype(kind)


def whole(pieces: Iterator[RowPiece], first: int) -> Tensor:
    """All rows, which must follow one another from ``first`` on."""
    found: list[Tensor] = []
    for piece in pieces:
        assert piece.first == first + sum(len(rows) for rows in found)
        found.append(piece.values.clone())
    return torch.cat(found)


@pytest.mark.parametrize(("kind", "dtype"), [(np.float32, torch.float32), (np.int64, torch.int64)])
@pytest.mark.parametrize("row_shape", [(64,), (3,), (2, 5), ()])
@pytest.mark.parametrize("form", ["headerless", "npy"])
def test_rows_are_those_of_numpy(tmp_path, form, row_shape, kind, dtype):
    array = made((ROWS, *row_shape), kind)
    path = tmp_path / "node_feat.npy"  # whatever it holds
    if form == "npy":
        np.save(path, array)
    else:
        array.tofile(path)
    opened = DirectRows.from_npy if form == "npy" else DirectRows.headerless
    with opened(path, dtype, row_shape, ROWS) as rows:
        assert len(rows) == ROWS
        for first, last in ((0, ROWS), (1, ROWS - 1), (257, 258), (ROWS - 3, ROWS)):
            found = whole(rows.read(first, last, PIECE, ahead=2, threads=3), first)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found.numpy(), array[first:last], strict=True)
        assert list(rows.read(7, 7)) == []


def test_values_that_numpy_lacks_are_read_as_their_bytes(tmp_path):
    bits = np.arange(256, dtype=np.uint8).reshape(16, 16)
    bits.tofile(tmp_path / "features.bin")
    np.save(tmp_path / "features.npy", bits)
    np.save(tmp_path / "signed.npy", bits.view(np.int8))
    expected = torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn)
    for rows in (
        DirectRows.headerless(tmp_path / "features.bin", torch.float8_e4m3fn, (16,), 16),
        DirectRows.from_npy(tmp_path / "features.npy", torch.float8_e4m3fn, (16,), 16),
        DirectRows.from_npy(tmp_path / "signed.npy", torch.float8_e4m3fn, (16,), 16),
    ):
        with rows:
            found = whole(rows.read(0, 16), 0)
            assert found.dtype == torch.float8_e4m3fn
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_values_behind_a_header_of_any_length_are_read(tmp_path):
    array = made((ROWS, 3), np.float64)
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (500, 3)}\n"  # not padded
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + array.tobytes())
    assert (path.stat().st_size - array.nbytes) % 8
    np.testing.assert_array_equal(np.load(path), array)
    with DirectRows.from_npy(path, torch.float64, (3,)) as rows:
        np.testing.assert_array_equal(whole(rows.read(0, ROWS, PIECE), 0).numpy(), array)


def test_pieces_have_as_many_whole_rows_as_fit(tmp_path):
    made((ROWS, 1024), np.uint8).tofile(tmp_path / "rows")
    with DirectRows.headerless(tmp_path / "rows", torch.uint8, (1024,)) as rows:
        sizes = [len(piece.values) for piece in rows.read(0, ROWS, PIECE)]
    assert set(sizes[:-1]) == {PIECE // 1024}


def refused(path: Path, message: str, form: str = "headerless", rows: int | None = ROWS) -> None:
    """``path`` is refused as rows of three float32, and its descriptor closed."""
    before = len(os.listdir("/proc/self/fd"))
    opened = DirectRows.from_npy if form == "npy" else DirectRows.headerless
    with pytest.raises(DataError, match=message) as raised:
        opened(path, torch.float32, (3,), rows)
    assert str(path) in str(raised.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_headerless_file_that_is_none_is_one_error(tmp_path):
    array, path = made((ROWS, 3), np.float32), tmp_path / "a.npy"
    refused(path, "No such file")
    path.write_bytes(array.tobytes()[:-5])
    refused(path, "no whole number of rows of 12 bytes .* offset 5,988 begins one that is cut off")
    array[1:].tofile(path)
    refused(path, "has 499 rows of 12 bytes and not 500")
    np.save(path, array)
    refused(path, "has numpy's header", rows=None)


def test_an_npy_file_that_is_none_is_one_error(tmp_path):
    array, path = made((ROWS, 3), np.float32), tmp_path / "a.npy"
    refused(path, "No such file", "npy")
    array.tofile(path)
    refused(path, "is it one without a header", "npy")
    for wrong, message in (
        (array.astype(np.float64), "holds <f8 and not <f4"),
        (array.astype(">f4"), "holds >f4 and not <f4"),
        (array.T.copy(), r"holds an array \(3, 500\) and not \(500, 3\)"),
        (np.asfortranarray(array), r"holds an array \(500, 3\) in Fortran order and not"),
        (array[:-1], r"holds an array \(499, 3\) and not \(500, 3\)"),
        (array[0, 0], r"holds an array \(\) and not"),
    ):
        np.save(path, wrong)
        refused(path, message, "npy")
    np.save(path, array)
    os.truncate(path, 1000)
    refused(path, "has 1,000 bytes and not 6,128", "npy")
    os.truncate(path, 50)
    refused(path, "cannot be read as an .npy file", "npy")


def test_rows_beyond_the_last_are_one_error(tmp_path):
    made((ROWS, 3), np.float32).tofile(tmp_path / "rows")
    with DirectRows.headerless(tmp_path / "rows", torch.float32, (3,)) as rows:
        with pytest.raises(DataError, match="rows has 500 rows, too few for rows 499 to 501"):
            rows.read(499, 501)
        with pytest.raises(ValueError, match="rows 5 to 4"):
            rows.read(5, 4)
    with pytest.raises(ValueError, match="have no bytes"):
        DirectRows.headerless(tmp_path / "rows", torch.float32, (0,))
