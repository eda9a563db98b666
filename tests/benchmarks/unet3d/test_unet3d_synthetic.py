"""The generated scans have what they promise: anatomy, intensities, sizes, determinism."""

import nibabel
import numpy as np
import pytest
from scipy import ndimage

from benchmarks.unet3d import raw, synthetic
from benchmarks.unet3d.prepare import prepare
from benchmarks.unet3d.synthetic import SyntheticScans, generate, plan
from benchmarks.unet3d.volumes import open_volumes
from common.errors import ConfigError

PATCH = (64, 64, 64)
SYNTHETIC = SyntheticScans(8, 4, PATCH, 56, 96)
TOUCHING = np.ones((3, 3, 3))


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic") / "raw"
    generate(folder, SYNTHETIC)
    return folder


@pytest.fixture(scope="module")
def volumes(raw_dir, tmp_path_factory):
    data = tmp_path_factory.mktemp("synthetic_data") / "data"
    prepare(raw_dir, data)
    return open_volumes(data, PATCH)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def components(mask):
    return ndimage.label(mask, TOUCHING)[1]


def test_cases_have_the_benchmarks_names_and_splits(volumes):
    # The reference's evaluation_cases.txt begins 00000 00003 00005 00006.
    assert [case.name for case in volumes.eval] == ["case_00000", "case_00003", "case_00005", "case_00006"]
    assert [int(case.name[-5:]) for case in volumes.train] == [1, 2, 4, 7, 8, 9, 10, 11]


def test_prepared_volumes_have_the_planned_anatomy(volumes):
    planned = {entry.name: entry.anatomy for entry in plan(SYNTHETIC)}
    for case in (*volumes.train, *volumes.eval):
        _, label = volumes.read(case)
        anatomy = planned[case.name]
        assert components(label > 0) == components(label == 1) == len(anatomy)
        assert components(label == 2) == sum(anatomy)


def test_intensities_are_like_the_benchmarks(volumes):
    for case in (*volumes.train, *volumes.eval):
        image, label = volumes.read(case)
        assert image.min() == pytest.approx((-79 - 101) / 76.9, abs=1e-5)
        assert image.max() == pytest.approx((304 - 101) / 76.9, abs=1e-5)
        inside = {value: ndimage.binary_erosion(label == value) for value in (1, 2)}
        assert np.median(image[inside[1]]) == pytest.approx(0.5, abs=0.1)
        if inside[2].any():
            assert np.median(image[inside[2]]) == pytest.approx(1.1, abs=0.15)
        tissue = (label == 0) & (image > -2) & (image < 0.3)
        assert np.median(image[tissue]) == pytest.approx(-1, abs=0.05)


def test_scans_differ_in_spacing_and_shape_and_are_resampled(raw_dir, volumes):
    spacings, shapes = set(), set()
    for case in (*volumes.train, *volumes.eval):
        header = nibabel.load(raw_dir / case.name / raw.IMAGE).header
        spacings.add(tuple(header["pixdim"][1:4].tolist()))
        shapes.add(header.get_data_shape())
        assert header.get_data_dtype() == np.int16
        assert header.get_data_shape() != case.shape
    assert len(spacings) == len(shapes) == 12


def test_prepared_shapes_are_the_planned_ones_padded_to_the_patch(volumes):
    made = {case.name: case.shape for case in (*volumes.train, *volumes.eval)}
    assert made == {entry.name: tuple(max(size, 64) for size in entry.shape) for entry in plan(SYNTHETIC)}


@pytest.mark.parametrize("split", ["train", "eval"])
def test_sizes_reach_both_branches_of_the_sliding_window(volumes, split):
    # With a patch of 64 windows are 32 apart: a rest of less than 16 is cropped, a larger one padded.
    rests = [size % 32 for case in getattr(volumes, split) for size in case.shape]
    assert any(0 < rest < 16 for rest in rests)
    assert any(rest >= 16 for rest in rests)


def test_files_depend_only_on_the_seed(raw_dir, tmp_path):
    generate(tmp_path / "same", SYNTHETIC)
    assert files(tmp_path / "same") == files(raw_dir)
    generate(tmp_path / "other", SyntheticScans(2, 1, PATCH, 56, 96, seed=1))
    other = files(tmp_path / "other")
    assert all(other[name] != content for name, content in files(raw_dir).items() if name in other)


@pytest.mark.usefixtures("forked_pools")
def test_files_do_not_depend_on_the_workers(raw_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "VOXELS_PER_WORKER", 1 << 20)
    generate(tmp_path / "parallel", SYNTHETIC, workers=2)
    assert files(tmp_path / "parallel") == files(raw_dir)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train": 0}, "--train=0: 1 to 168"),
        ({"train": 169}, "--train=169: 1 to 168"),
        ({"eval": 43}, "--eval=43: 1 to 42"),
        ({"smallest": 31}, "--smallest=31"),
        ({"smallest": 97}, "--smallest=97 --largest=96"),
        ({"largest": 513}, "--largest=513"),
        ({"seed": -1}, "--seed=-1"),
    ],
)
def test_numbers_out_of_range_are_an_error(wrong, message):
    right = {"train": 2, "eval": 1, "smallest": 56, "largest": 96, "patch": PATCH, "seed": 0}
    with pytest.raises(ConfigError, match=message):
        SyntheticScans(**{**right, **wrong})
