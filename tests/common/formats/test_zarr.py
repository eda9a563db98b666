"""Zarr arrays: regions, arrays written here and by libraries, and errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import CheckpointError
from common.formats.zarr import ZarrArray

SHAPE, CHUNKS = (3, 10, 7), (1, 4, 3)
DESCRIPTION = {
    "zarr_format": 2, "shape": [3, 10, 7], "chunks": [1, 4, 3], "dtype": "<f4", "compressor": None,
    "fill_value": None, "filters": None, "order": "C",
}  # fmt: skip


def values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SHAPE).astype("<f4")


def by_hand(folder: Path, **changes: Any) -> Path:
    """Write the array with NumPy by the specification; edge chunks have NaN beyond the array."""
    folder.mkdir(parents=True)
    (folder / ".zarray").write_text(json.dumps(DESCRIPTION | changes))
    padded = np.full((3, 12, 9), np.nan, "<f4")
    padded[tuple(map(slice, SHAPE))] = values()
    for i, j, k in itertools.product(range(3), range(3), range(3)):
        padded[i : i + 1, 4 * j : 4 * j + 4, 3 * k : 3 * k + 3].tofile(folder / f"{i}.{j}.{k}")
    return folder


@pytest.mark.parametrize(
    "region",
    [
        ((0, 3), (0, 10), (0, 7)),
        ((1, 2), (4, 8), (3, 6)),
        ((2, 3), (9, 10), (6, 7)),
        ((0, 3), (3, 9), (2, 7)),
        ((0, 2), (5, 6), (0, 7)),
    ],
)
def test_a_region_has_the_values_of_the_array(tmp_path, region):
    array = ZarrArray.open(by_hand(tmp_path / "a"))
    expected = values()[tuple(slice(*bounds) for bounds in region)]
    assert array.read(region).dtype == torch.float32
    np.testing.assert_array_equal(array.read(region).numpy(), expected)
    array.check(region)


def test_only_the_bytes_of_the_region_are_read(tmp_path):
    """In a chunk (1, 4, 3), from row 1, column 1 to row 2, column 2."""
    array = ZarrArray.open(by_hand(tmp_path / "a"))
    (piece,) = array.pieces(((1, 2), (1, 3), (1, 3)))
    read = array.read_piece(piece)
    assert read.untyped_storage().nbytes() == 5 * 4
    np.testing.assert_array_equal(read.numpy(), values()[1:2, 1:3, 1:3])


def test_other_chunks_may_be_missing(tmp_path):
    folder = by_hand(tmp_path / "a")
    (folder / "2.0.0").unlink()
    array = ZarrArray.open(folder)
    np.testing.assert_array_equal(array.read(((0, 2), (0, 10), (0, 7))).numpy(), values()[:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_a_written_array_is_read_back(tmp_path, dtype):
    whole = (torch.from_numpy(values()) * 100).to(dtype)
    array = ZarrArray.create(tmp_path / "a", SHAPE, CHUNKS, dtype)
    for layer in range(3):
        array.write(whole[layer : layer + 1], (layer, 0, 0))
    found = ZarrArray.open(tmp_path / "a")
    assert found == array
    assert torch.equal(found.read(), whole)
    assert len(list((tmp_path / "a").iterdir())) == 1 + 3 * 3 * 3


def test_a_written_array_follows_the_specification(tmp_path):
    folder = by_hand(tmp_path / "hand")
    ZarrArray.create(tmp_path / "ours", SHAPE, CHUNKS, torch.float32).write(torch.from_numpy(values()))
    assert json.loads((tmp_path / "ours" / ".zarray").read_text()) == DESCRIPTION
    for path in folder.iterdir():
        ours = tmp_path / "ours" / path.name
        if path.name == "0.0.0":
            assert ours.read_bytes() == path.read_bytes()
        assert path.name == ".zarray" or ours.stat().st_size == path.stat().st_size == 48


@pytest.mark.parametrize("name", ["bfloat16", "<V2", "|V2"])
def test_bfloat16_has_three_names(tmp_path, name):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / ".zarray").write_text(json.dumps(DESCRIPTION | {"dtype": name, "shape": [3], "chunks": [3]}))
    np.array([0x3F80, 0xC020, 0x0001], "<u2").tofile(folder / "0")
    found = ZarrArray.open(folder).read()
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [1.0, -2.5, 2.0**-133]


def test_chunks_may_lie_in_folders(tmp_path):
    folder = tmp_path / "a"
    (folder / "1").mkdir(parents=True)
    changes = {"shape": [4, 2], "chunks": [2, 2], "dimension_separator": "/"}
    (folder / ".zarray").write_text(json.dumps(DESCRIPTION | changes))
    np.arange(4, dtype="<f4").tofile(folder / "1" / "0")
    assert ZarrArray.open(folder).read(((2, 4), (0, 2))).tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zarr_format": 3}, "zarr_format 3, and version 2"),
        ({"compressor": {"id": "blosc"}}, "compressed"),
        ({"filters": [{"id": "delta"}]}, "filtered"),
        ({"order": "F"}, "order 'F'"),
        ({"dtype": ">f4"}, "dtype '>f4', and bfloat16"),
        ({"dtype": [["x", "<f4"]]}, "dtype"),
        ({"shape": [3, 10]}, r"shape \[3, 10\] does not go with chunks"),
        ({"shape": [3, -1, 7]}, r"shape \[3, -1, 7\], where positive"),
        ({"shape": 3}, "shape 3, where positive"),
        ({"chunks": [1, 4, 2.5]}, "chunks .* where positive"),
        ({"dimension_separator": "../"}, "dimension_separator"),
    ],
)
def test_an_unsupported_description_is_refused(tmp_path, changes, words):
    with pytest.raises(CheckpointError, match=words):
        ZarrArray.open(by_hand(tmp_path / "a", **changes))


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000])
def test_a_damaged_description_is_refused(tmp_path, text):
    folder = by_hand(tmp_path / "a")
    (folder / ".zarray").write_text(text)
    with pytest.raises(CheckpointError, match=r"\.zarray is damaged"):
        ZarrArray.open(folder)


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_an_array_is_refused(tmp_path, exists):
    if exists:
        (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match="a is no Zarr array"):
        ZarrArray.open(tmp_path / "a")


def test_missing_and_short_chunks_are_refused(tmp_path):
    folder = by_hand(tmp_path / "a")
    array, region = ZarrArray.open(folder), ((0, 3), (0, 10), (0, 7))
    (folder / "1.2.0").write_bytes(b"\0" * 20)
    for read in (array.check, array.read):
        with pytest.raises(CheckpointError, match=r"1\.2\.0: .*cut off"):
            read(region)
    (folder / "1.2.0").unlink()
    for read in (array.check, array.read):
        with pytest.raises(CheckpointError, match=r"1\.2\.0: a chunk is missing"):
            read(region)
    (folder / "1.2.0").write_bytes(b"\0" * 49)
    with pytest.raises(CheckpointError, match=r"1\.2\.0: a chunk of 49 bytes, where 48"):
        array.check(region)


@pytest.mark.parametrize("region", [((0, 3), (0, 11), (0, 7)), ((0, 3), (0, 10)), ((0, 0), (0, 10), (0, 7))])
def test_no_region_reaches_beyond_the_array(tmp_path, region):
    with pytest.raises(ValueError, match="no region"):
        ZarrArray.open(by_hand(tmp_path / "a")).read(region)


def test_parts_of_chunks_are_not_written(tmp_path):
    array = ZarrArray.create(tmp_path / "a", SHAPE, CHUNKS, torch.float32)
    with pytest.raises(ValueError, match="write whole chunks"):
        array.write(torch.zeros(1, 5, 7))
    with pytest.raises(ValueError, match="no Zarr array is written of"):
        ZarrArray.create(tmp_path / "b", SHAPE, CHUNKS, torch.bool)
    with pytest.raises(ValueError, match="does not go with chunks"):
        ZarrArray.create(tmp_path / "b", SHAPE, CHUNKS[:2], torch.float32)
