"""Arrays that are read in place from a few files, by an index of their positions."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.data.indexed_arrays import ArrayBatches, IndexedArrays, index_shard, open_index, write_index
from common.errors import DataError
from common.formats.array_shards import ArraySample, ArrayShards

SHAPES = {"wide": (2, 2), "long": (3,)}
FILES = (2, 3)
"""Samples of each file."""
HEADER = 5


def array(name: str, number: int) -> torch.Tensor:
    shape = SHAPES[name]
    return (torch.arange(float(np.prod(shape))).reshape(shape) + 10 * number).to(torch.bfloat16)


def write(root: Path) -> SimpleNamespace:
    """Write files of samples behind a few other bytes, with their index; return the manifest's part that is read."""
    (root / "part").mkdir(parents=True)
    offsets, number, files = (
        [],
        0,
        {"other/x.bin": SimpleNamespace(bytes=1), "part/index.npy": SimpleNamespace(bytes=1)},
    )
    for file, count in enumerate(FILES):
        content, rows = b"-" * HEADER, []
        for _ in range(count):
            rows.append([])
            for name in SHAPES:
                rows[-1].append(len(content))
                content += array(name, number).view(torch.int16).numpy().tobytes()
            number += 1
        offsets.append(root / f"part{file}.npy")
        np.save(offsets[-1], np.array(rows, np.int64))
        (root / "part" / f"{file}.bin").write_bytes(content)
        files[f"part/{file}.bin"] = SimpleNamespace(bytes=len(content))
    assert len(write_index(root / "part", offsets)) == sum(FILES)
    return SimpleNamespace(files=files)


def opened(root: Path) -> IndexedArrays:
    return open_index(root, write(root), "part", sum(FILES), SHAPES, "prepare again")


def test_batches_have_the_arrays_of_any_rows(tmp_path):
    batches = ArrayBatches(opened(tmp_path), 2, 1, False, 0, "verify")
    rows, given = [4, 0, 2], torch.full((3,), 7.0, dtype=torch.bfloat16)
    tensors = batches.begin(rows, 4, {"ids": torch.tensor(rows)}, [{}, {"long": given}, {}]).finish()
    assert tensors["ids"].tolist() == rows
    for name, shape in SHAPES.items():
        assert tensors[name].shape == (4, *shape)
        assert not tensors[name][3].any()
        for slot, row in enumerate(rows):
            expected = given if (slot, name) == (1, "long") else array(name, row)
            assert torch.equal(tensors[name][slot], expected)
    batches.threads.close()
    batches.close()


def test_a_file_that_is_cut_off_is_named_with_the_remedy(tmp_path):
    batches = ArrayBatches(opened(tmp_path), 1, 1, False, 0, "verify it")
    (tmp_path / "part" / "1.bin").write_bytes(b"-" * HEADER)
    with pytest.raises(DataError, match=r"1\.bin is cut off: wide of sample 3 ends at byte .*; verify it"):
        batches.begin([3], 1, {}).finish()
    batches.threads.close()
    batches.close()


@pytest.mark.parametrize("wrong", [[0, 10**6, 5], [2, 5, 5], [-1, 5, 5]], ids=["offset", "file", "negative"])
def test_positions_outside_of_the_files_are_refused(wrong, tmp_path):
    found = write(tmp_path)
    index = np.load(tmp_path / "part" / "index.npy")
    index[1] = wrong
    np.save(tmp_path / "part" / "index.npy", index)
    with pytest.raises(DataError, match=r"index\.npy has positions outside of the files; prepare again"):
        open_index(tmp_path, found, "part", sum(FILES), SHAPES, "prepare again")


def test_an_index_of_another_number_of_samples_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"int64 \(5, 3\), expected int64 \(6, 3\); prepare again"):
        open_index(tmp_path, write(tmp_path), "part", 6, SHAPES, "prepare again")


def test_samples_of_all_files_have_their_integers(tmp_path):
    found, parts = write(tmp_path), [tmp_path / f"with{file}.npy" for file in range(2)]
    labels = np.split(np.arange(5) * 3, [2])
    for file, part in enumerate(parts):
        np.save(part, np.column_stack([np.load(tmp_path / f"part{file}.npy"), labels[file]]))
    write_index(tmp_path / "part", parts)
    arrays = open_index(tmp_path, found, "part", 5, SHAPES, "prepare again", integers=True)
    assert arrays.integers_S.tolist() == [0, 3, 6, 9, 12]
    assert arrays.numbers_S.tolist() == [0, 0, 1, 1, 1]


def test_a_shard_is_described_and_its_part_of_the_index_is_written(tmp_path):
    shards, path = ArrayShards({name: name for name in SHAPES}, "label"), tmp_path / "0.arrow"
    samples = [ArraySample(str(n), {name: array(name, n) for name in SHAPES}, 3 * n) for n in range(3)]
    shards.write(path, samples)
    found = index_shard(path, tmp_path / "0.npy", shards, SHAPES, 7)
    assert found == {
        "samples": 3, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }  # fmt: skip
    assert np.array_equal(np.load(tmp_path / "0.npy")[:, :2], shards.offsets(path, SHAPES))
    with pytest.raises(DataError, match="sample 2 has the label 6, outside of 0 to 5"):
        index_shard(path, tmp_path / "0.npy", shards, SHAPES, 6)
