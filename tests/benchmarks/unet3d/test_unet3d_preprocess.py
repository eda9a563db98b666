"""Test the preprocessing against scipy's interpolation and numbers computed by hand, and damaged files."""

import gzip

import nibabel
import numpy as np
import pytest
import small_scans
from scipy import ndimage

from benchmarks.unet3d.preprocess import Scan, load_scan, preprocess, voxels_of
from common.errors import DataError

NO_PATCH = (1, 1, 1)
KEPT = (1.6, 1.2, 1.2)  # the spacing of prepared volumes


def scan(image, spacing, label=None):
    label = np.zeros(image.shape, np.uint8) if label is None else label
    return Scan(np.ascontiguousarray(image, np.float32), label, spacing)


def files(folder):
    return folder / "imaging.nii.gz", folder / "segmentation.nii.gz"


def linear(image, shape):
    """Resample trilinearly in float64; the corners of both grids coincide."""
    positions = np.meshgrid(
        *(np.linspace(0, old - 1, new) for old, new in zip(image.shape, shape, strict=True)), indexing="ij"
    )
    return ndimage.map_coordinates(image.astype(np.float64), positions, order=1)


@pytest.mark.parametrize(
    ("shape", "spacing", "expected"),
    [((7, 9, 11), (2.4, 1.5, 0.9), (10, 11, 8)), ((13, 21, 17), (0.8, 0.7, 0.7), (6, 12, 9))],
)
def test_resampled_images_equal_scipys(shape, spacing, expected):
    image = np.random.default_rng(0).uniform(-79, 304, shape)  # of a range that is not clipped
    made, _ = preprocess(scan(image, spacing), NO_PATCH)
    assert made.shape == (1, *expected)
    np.testing.assert_allclose(made[0], (linear(image, expected) - 101.0) / 76.9, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "spacing"), [((7, 9, 11), (2.4, 1.5, 0.9)), ((13, 21, 17), (0.8, 0.7, 0.7)), ((29, 58, 31), KEPT)]
)
def test_labels_are_those_at_the_lower_position(shape, spacing):
    label = np.random.default_rng(0).integers(0, 3, shape).astype(np.uint8)
    _, made = preprocess(scan(np.zeros(shape), spacing, label), NO_PATCH)
    positions = [
        np.minimum(np.floor(np.arange(new, dtype=np.float32) * (np.float32(old) / np.float32(new))), old - 1)
        for old, new in zip(shape, made.shape[1:], strict=True)
    ]
    np.testing.assert_array_equal(made[0], label[np.ix_(*(position.astype(int) for position in positions))])


@pytest.mark.parametrize(
    ("spacing", "expected"),
    [
        ((1.6, 1.2, 1.2), (10, 10, 10)),
        ((1.75, 1.31, 1.2), (10, 10, 10)),  # 10.94 and 10.92 are cut off
        ((1.77, 1.33, 1.09), (11, 11, 9)),
    ],
)
def test_fractions_of_voxels_are_rounded_down(spacing, expected):
    made, _ = preprocess(scan(np.zeros((10, 10, 10)), spacing), NO_PATCH)
    assert made.shape[1:] == expected


def test_a_scan_with_the_target_spacing_keeps_its_voxels(tmp_path):
    # 1.6 and 1.2 of a header are not those of Python: it is resampled to its own shape.
    small_scans.write_case(tmp_path, (12, 14, 16), KEPT)
    found = load_scan(*files(tmp_path))
    assert found.spacing == tuple(float(np.float32(axis)) for axis in KEPT) != KEPT
    image, label = preprocess(found, NO_PATCH)
    np.testing.assert_allclose(image[0] * 76.9 + 101, np.clip(found.image, -79, 304), atol=1e-3)
    np.testing.assert_array_equal(label[0], found.label)


def test_intensities_are_clipped_and_scaled():
    image = np.array([-1000, -79, 24.1, 101, 177.9, 304, 3000], np.float32).reshape(1, 1, 7)
    made, _ = preprocess(scan(image, KEPT), NO_PATCH)
    # (x - 101) / 76.9 between -79 and 304
    np.testing.assert_allclose(made[0, 0, 0], [-2.3407022, -2.3407022, -1, 0, 1, 2.6397919, 2.6397919], rtol=1e-6)


def test_small_volumes_are_padded_with_their_edges():
    image = np.array([101, 177.9], np.float32).reshape(2, 1, 1) * np.ones((1, 2, 1), np.float32)
    label = np.array([1, 2], np.uint8).reshape(2, 1, 1) * np.ones((1, 2, 1), np.uint8)
    made, made_label = preprocess(scan(image, KEPT, label), (5, 2, 4))
    assert made.shape == made_label.shape == (1, 5, 2, 4)
    # Three voxels are missing: one is added before, two after.
    np.testing.assert_allclose(made[0, :, 0, 0], [0, 0, 1, 1, 1], atol=1e-7)
    np.testing.assert_array_equal(made_label[0, :, 1, 3], [1, 1, 2, 2, 2])


def test_larger_volumes_are_not_padded():
    made, _ = preprocess(scan(np.zeros((9, 8, 7)), KEPT), (8, 8, 8))
    assert made.shape == (1, 9, 8, 8)


def test_results_are_contiguous_fp32_and_uint8(tmp_path):
    small_scans.write_case(tmp_path, (9, 10, 11), (2.0, 1.0, 1.0))
    image, label = preprocess(load_scan(*files(tmp_path)), (16, 4, 4))
    assert (image.dtype, label.dtype) == (np.float32, np.uint8)
    assert image.flags.c_contiguous
    assert label.flags.c_contiguous


def test_axes_are_not_reoriented(tmp_path):
    image = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
    affine = np.array([[0, 0, -0.5, 0], [0, -0.75, 0, 0], [-3.0, 0, 0, 0], [0, 0, 0, 1]])  # KiTS19's kind
    for path, array in zip(files(tmp_path), (image, (image % 3).astype(np.uint8)), strict=True):
        nibabel.save(nibabel.Nifti1Image(array, affine), path)
    found = load_scan(*files(tmp_path))
    assert found.spacing == (3.0, 0.75, 0.5)
    np.testing.assert_array_equal(found.image, image)
    np.testing.assert_array_equal(found.label, image % 3)


def test_voxels_from_the_header_equal_those_of_scan_and_volume(tmp_path):
    small_scans.write_case(tmp_path, (9, 10, 11), (2.0, 1.0, 1.0))
    made, _ = preprocess(load_scan(*files(tmp_path)), (8, 16, 4))
    assert voxels_of(files(tmp_path)[0], (8, 16, 4)) == (9 * 10 * 11, made.size)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-50])


def flip_a_bit_of_the_voxels(path):
    # In an uncompressed block, only the checksum reveals the change.
    plain = gzip.decompress(path.read_bytes())
    stored = bytearray(gzip.compress(plain, compresslevel=0))
    stored[-100] ^= 1
    path.write_bytes(stored)


def no_gzip(path):
    path.write_bytes(b"<html>404</html>" * 30)


def no_nifti(path):
    path.write_bytes(gzip.compress(b"<html>404</html>" * 30))


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit_of_the_voxels, no_gzip, no_nifti, empty])
@pytest.mark.parametrize("which", [0, 1], ids=["image", "label"])
def test_the_error_for_a_damaged_file_names_it(tmp_path, damage, which):
    small_scans.write_case(tmp_path / "case_00007", (9, 10, 11), (2.0, 1.0, 1.0))
    path = files(tmp_path / "case_00007")[which]
    damage(path)
    with pytest.raises(DataError, match=rf"case_00007/{path.name} cannot be read \(.*\); fetch it again"):
        load_scan(*files(tmp_path / "case_00007"))


@pytest.mark.parametrize("value", [3, 255, 1.5, -1, 256, np.nan])
def test_the_error_for_an_invalid_label_names_it(tmp_path, value):
    small_scans.write_case(tmp_path / "case_00007", (4, 4, 4), KEPT)
    label = np.zeros((4, 4, 4), np.float32)
    label[1, 2, 3] = value
    small_scans.write_nifti(tmp_path / "case_00007" / "segmentation.nii.gz", label, KEPT)
    with pytest.raises(DataError, match=rf"case_00007/segmentation.nii.gz: label {value:g}, expected 0 \(background\)"):
        load_scan(*files(tmp_path / "case_00007"))


def test_the_error_for_labels_of_another_shape_names_the_files(tmp_path):
    small_scans.write_case(tmp_path / "case_00007", (4, 5, 6), KEPT)
    small_scans.write_nifti(tmp_path / "case_00007" / "segmentation.nii.gz", np.zeros((4, 6, 5), np.uint8), KEPT)
    with pytest.raises(DataError, match=r"case_00007/imaging.nii.gz has the shape \(4, 5, 6\) and .* \(4, 6, 5\)"):
        load_scan(*files(tmp_path / "case_00007"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_intensity_that_is_not_finite_is_an_error(value, tmp_path):
    small_scans.write_case(tmp_path, (4, 4, 4), KEPT)
    image = np.zeros((4, 4, 4), np.float32)
    image[0, 0, 0] = value
    small_scans.write_nifti(files(tmp_path)[0], image, KEPT)
    with pytest.raises(DataError, match=r"imaging.nii.gz has intensities that are not finite"):
        load_scan(*files(tmp_path))


def test_four_axes_are_an_error(tmp_path):
    small_scans.write_case(tmp_path, (4, 4, 4), KEPT)
    small_scans.write_nifti(files(tmp_path)[0], np.zeros((4, 4, 4, 2), np.int16), KEPT)
    with pytest.raises(DataError, match=r"imaging.nii.gz has the shape \(4, 4, 4, 2\)"):
        load_scan(*files(tmp_path))


def with_spacing(path, spacing):
    """Write ``spacing`` to the header; nibabel would reject some values."""
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[80:92] = np.array(spacing, "<f4").tobytes()  # pixdim[1:4], NIfTI-1 section 5
    path.write_bytes(gzip.compress(bytes(content)))


@pytest.mark.parametrize("read", [lambda one, two: load_scan(one, two), lambda one, two: voxels_of(one, NO_PATCH)])
@pytest.mark.parametrize(
    ("spacing", "message"),
    [
        ((0.0, 1.0, 1.0), "the spacing"),
        ((1.0, np.nan, 1.0), "the spacing"),
        ((1.0, 1.0, np.inf), "the spacing"),
        ((1e-3, 1.0, 1.0), "not possible for a scan"),  # without a slice
        ((1e9, 1e3, 1.0), "not possible for a scan"),  # larger than the memory
    ],
)
def test_an_invalid_spacing_is_an_error(tmp_path, spacing, message, read):
    small_scans.write_case(tmp_path, (4, 4, 4), KEPT)
    with_spacing(files(tmp_path)[0], spacing)
    with pytest.raises(DataError, match=rf"imaging.nii.gz: .*{message}"):
        read(*files(tmp_path))
