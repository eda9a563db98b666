"""Shards of bf16 arrays in both published forms, against pyarrow, tarfile and numpy."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch

from common.errors import DataError
from common.formats import saved_dataset
from common.formats.array_shards import (
    TAR,
    ArraySample,
    ArrayShards,
    encoded,
    require_finite,
    shards_of,
    values_offset,
)

SHARDS = ArrayShards({"left": "left_column", "right": "right"}, "label")
SHAPES = {"right": (4,), "left": (2, 3)}
NAMES = {"arrow": "data-00000-of-00001.arrow", "tar": "shard_000000.tar"}
FORMS = tuple(NAMES)


def array(name: str, number: int) -> torch.Tensor:
    shape = SHAPES[name]
    return (torch.arange(float(np.prod(shape))) + 10 * number + len(name)).reshape(shape).to(torch.bfloat16)


def written(folder: Path, form: str, labels: tuple[int | None, ...] = (3, 0, 2)) -> Path:
    path = folder / NAMES[form]
    arrays = ({name: array(name, number) for name in SHAPES} for number in range(len(labels)))
    keys = (f"{number:03d}" for number in range(len(labels)))
    SHARDS.write(path, map(ArraySample, keys, arrays, labels))
    return path


def bits(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(content)).view(np.int16)).view(torch.bfloat16)


def test_pyarrow_reads_what_is_written(tmp_path):
    rows = pyarrow.ipc.open_stream(written(tmp_path, "arrow", (3, None)).read_bytes()).read_all().to_pylist()
    assert [(row["__key__"], row["label"]) for row in rows] == [("000", 3), ("001", None)]
    for number, row in enumerate(rows):
        assert torch.equal(bits(row["left_column"]), array("left", number))
        assert torch.equal(bits(row["right"]), array("right", number))


def test_tarfile_reads_what_is_written(tmp_path):
    with tarfile.open(written(tmp_path, "tar", (3, None))) as tar:
        found = {name: tar.extractfile(name).read() for name in tar.getnames()}
    assert [json.loads(found[f"{key}.json"]) for key in ("000", "001")] == [
        {"key": "000", "label": 3}, {"key": "001"},
    ]  # fmt: skip
    assert torch.equal(bits(found["001.left.bytes"]), array("left", 1))


@pytest.mark.parametrize("form", FORMS)
def test_offsets_and_integers_lead_to_the_values(form, tmp_path):
    path = written(tmp_path, form)
    offsets_SA, content = SHARDS.offsets(path, SHAPES), path.read_bytes()
    assert offsets_SA.shape == (3, 2)
    for number, offsets in enumerate(offsets_SA):
        for (name, shape), offset in zip(SHAPES.items(), offsets, strict=True):
            values = torch.frombuffer(
                bytearray(content), dtype=torch.bfloat16, count=int(np.prod(shape)), offset=offset
            )
            assert torch.equal(values.reshape(shape), array(name, number))
    assert SHARDS.integers(path, 4).tolist() == [3, 0, 2]
    require_finite(path, offsets_SA, SHAPES)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("labels", "message"), [((1, None), "sample 1 has no label"), ((4,), "outside of 0 to 3")])
def test_integers_must_be_there_and_in_range(form, labels, message, tmp_path):
    path = written(tmp_path, form, labels)
    with pytest.raises(DataError, match=message):
        SHARDS.integers(path, 4)


@pytest.mark.parametrize("form", FORMS)
def test_arrays_of_another_shape_are_refused(form, tmp_path):
    with pytest.raises(DataError, match=r"left of sample 0: uint16 \(2, 3\), expected uint16 \(3, 2\)"):
        SHARDS.offsets(written(tmp_path, form), {"right": (4,), "left": (3, 2)})


def test_values_that_are_not_finite_are_named(tmp_path):
    path = tmp_path / NAMES["arrow"]
    infinite = torch.full(SHAPES["left"], torch.inf, dtype=torch.bfloat16)
    SHARDS.write(path, [ArraySample("a", {"right": array("right", 0), "left": infinite}, None)])
    with pytest.raises(DataError, match="left of sample 0 has values that are not finite"):
        require_finite(path, SHARDS.offsets(path, SHAPES), SHAPES)


def test_shards_are_listed_in_order(tmp_path):
    saved_dataset.write_state(tmp_path, SHARDS.schema, 2)
    names = [saved_dataset.shard_name(number, 2) for number in range(2)]
    for name in names:
        (tmp_path / name).touch()
    assert shards_of(tmp_path / saved_dataset.STATE) == [tmp_path / name for name in names]
    for number in (1, 0):
        (tmp_path / TAR.format(number)).touch()
    assert [path.name for path in shards_of(tmp_path / TAR.format(0))] == [TAR.format(0), TAR.format(1)]
    (tmp_path / TAR.format(0)).unlink()
    with pytest.raises(DataError, match=r"has shard_000001\.tar where shard_000000\.tar belongs"):
        shards_of(tmp_path / TAR.format(1))


def test_numpy_reads_the_bits():
    values = torch.linspace(-3, 3, 60).to(torch.bfloat16).reshape(3, 20)
    for array in (values, values.T, values[:, ::2], values[0]):
        content = encoded(array)
        bits = np.load(io.BytesIO(content))
        assert bits.dtype == np.uint16
        assert torch.equal(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), array)
        offset = values_offset(content + b"rest", len(content), tuple(array.shape), "array")
        assert content[offset:] == bits.tobytes()


def test_headers_of_other_programs_are_read():
    file = io.BytesIO()
    np.lib.format.write_array(file, np.arange(6, dtype=np.uint16).reshape(2, 3), version=(2, 0))
    content = file.getvalue()
    offset = values_offset(content, len(content), (2, 3), "array")
    assert np.array_equal(np.frombuffer(content[offset:], np.uint16), np.arange(6))


@pytest.mark.parametrize(
    ("array", "cut", "message"),
    [
        (np.zeros((2, 3), np.int16), 0, r"array: int16 \(2, 3\), expected uint16 \(2, 3\)"),
        (np.zeros((3, 2), np.uint16), 0, r"array: uint16 \(3, 2\), expected uint16 \(2, 3\)"),
        (np.asfortranarray(np.zeros((2, 3), np.uint16)), 0, "in C order"),
        (np.zeros((2, 3), np.uint16), 1, "array has 139 bytes, but uint16 .* takes 140"),
        (np.zeros((2, 3), np.uint16), 100, "array is no .npy"),
    ],
)
def test_other_arrays_are_refused(array, cut, message):
    file = io.BytesIO()
    np.save(file, array)
    content = file.getvalue()[: len(file.getvalue()) - cut]
    with pytest.raises(DataError, match=message):
        values_offset(content, len(content), (2, 3), "array")
