"""Opening and reading prepared volumes, and folders that are none or are damaged."""

import json

import numpy as np
import pytest
import small_scans

from benchmarks.unet3d.prepare import prepare
from benchmarks.unet3d.volumes import VolumeEntry, open_volumes
from common.errors import DataError

SHAPES = {  # by hand: voxels times spacing over 1.6 and 1.2, cut off, then padded to 24 x 20 x 20
    "case_00000": (31, 20, 20),
    "case_00001": (25, 30, 32),
    "case_00002": (24, 22, 22),
    "case_00003": (30, 20, 23),
}


@pytest.fixture
def root(tmp_path):
    prepare(small_scans.write_raw(tmp_path / "raw"), tmp_path / "data")
    return tmp_path / "data"


def edit(root, name, change):
    """Change a JSON file, and its size in the manifest."""
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))
    if name != "manifest.json":
        size = (root / name).stat().st_size
        edit(root, "manifest.json", lambda manifest: manifest["files"][name].update(bytes=size))


def test_cases_are_sorted_and_assigned_to_their_splits(root):
    volumes = open_volumes(root, small_scans.PATCH)
    assert volumes.train == tuple(VolumeEntry(name, SHAPES[name], "train") for name in ("case_00001", "case_00002"))
    assert volumes.eval == tuple(VolumeEntry(name, SHAPES[name], "eval") for name in ("case_00000", "case_00003"))
    assert volumes.synthetic


def test_volumes_equal_the_files(root):
    volumes = open_volumes(root, small_scans.PATCH)
    for case in (*volumes.train, *volumes.eval):
        image, label = volumes.read(case)
        assert (image.dtype, label.dtype) == (np.float32, np.uint8)
        assert image.flags.c_contiguous
        assert label.flags.c_contiguous
        # Behind a header of 128 bytes the voxels lie in the order of the axes.
        np.testing.assert_array_equal(image.ravel(), np.fromfile(root / f"{case.name}_x.npy", "<f4", offset=128))
        np.testing.assert_array_equal(label.ravel(), np.fromfile(root / f"{case.name}_y.npy", "u1", offset=128))
        assert image.shape == label.shape == SHAPES[case.name]


def test_file_sizes_of_a_published_volume():
    # The largest of KiTS19, in the hints that NVIDIA gives its reader: 313,997,472 and 78,499,368 bytes without headers
    case = VolumeEntry("case_00000", (1, 1, 78_499_368), "train")
    assert case.file_bytes == {"case_00000_x.npy": 313_997_472 + 128, "case_00000_y.npy": 78_499_368 + 128}


@pytest.mark.parametrize("patch", [(25, 20, 20), (24, 21, 20), (24, 20, 21)])
def test_the_error_for_a_volume_smaller_than_the_crop_names_it(root, patch):
    x = "x".join(map(str, patch))
    with pytest.raises(DataError, match=rf"case_0000[02] has (31x20x20|24x22x22) voxels, too few for crops of {x}"):
        open_volumes(root, patch)


def test_the_error_for_a_case_not_in_the_manifest_names_it(root):
    edit(root, "manifest.json", lambda manifest: manifest["files"].pop("case_00001_y.npy"))
    with pytest.raises(DataError, match=r"manifest.json lacks case_00001_y.npy of case_00001"):
        open_volumes(root, small_scans.PATCH)


def test_the_error_for_a_wrong_shape_names_the_file(root):
    edit(root, "cases.json", lambda cases: cases["case_00001"].update(shape=[26, 30, 32]))
    with pytest.raises(DataError, match=r"case_00001_x.npy has 96128 bytes, but a volume of 26x30x32 voxels takes"):
        open_volumes(root, small_scans.PATCH)


@pytest.mark.parametrize(
    "change",
    [
        lambda cases: cases.update(case_00001=[]),
        lambda cases: cases["case_00001"].update(shape=[1, 2]),
        lambda cases: cases["case_00001"].update(shape=["a", 2, 3]),
        lambda cases: cases["case_00001"].update(split="test"),
        lambda cases: cases["case_00001"].pop("shape"),
    ],
)
def test_the_error_for_a_damaged_list_of_cases_names_it(root, change):
    edit(root, "cases.json", change)
    with pytest.raises(DataError, match=r"cases.json is damaged"):
        open_volumes(root, small_scans.PATCH)


@pytest.mark.parametrize(("split", "left"), [("train", "case_00000"), ("eval", "case_00001")])
def test_a_split_without_cases_is_an_error(root, split, left):
    def keep_one(cases):
        one = cases[left]
        cases.clear()
        cases[left] = one

    edit(root, "cases.json", keep_one)
    with pytest.raises(DataError, match=f"has no case for {split}"):
        open_volumes(root, small_scans.PATCH)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((1, 25, 32, 30), np.float32),
        np.zeros((25, 30, 32), np.float32),
        np.zeros((1, 25, 30, 32), np.int32),
        np.zeros((1, 32, 30, 25), np.float32).T.reshape(1, 25, 30, 32, order="F"),
    ],
    ids=["axes exchanged", "no channel", "integers", "another order"],
)
def test_the_error_for_another_array_of_equal_size_names_the_file(root, array):
    np.save(root / "case_00001_x.npy", array)
    volumes = open_volumes(root, small_scans.PATCH)
    with pytest.raises(DataError, match=r"case_00001_x.npy: (float32|int32) of shape .*, but cases.json gives"):
        volumes.read(volumes.train[0])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b"\0" * path.stat().st_size),
        lambda path: path.write_bytes(b""),
    ],
    ids=["missing", "cut off", "zeros", "empty"],
)
def test_the_error_for_a_file_damaged_after_opening_names_it(root, damage):
    volumes = open_volumes(root, small_scans.PATCH)
    damage(root / "case_00001_y.npy")
    with pytest.raises(DataError, match=r"case_00001_y.npy cannot be read .*; run 'mlperf-suite verify"):
        volumes.read(volumes.train[0])
