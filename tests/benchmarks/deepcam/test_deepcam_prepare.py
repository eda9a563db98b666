"""Preparation of DeepCAM's data: the published HDF5 files, adopted files, and synthetic images."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import small_images
from scipy.stats import norm

from benchmarks.deepcam import raw
from benchmarks.deepcam.prepare import adopt, prepare, verify
from benchmarks.deepcam.samples import LIST
from benchmarks.deepcam.synthetic import OFFSETS, SPREADS, SyntheticImages, draw, generate
from common.data.synthetic import mark
from common.errors import DataError


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Return a folder with the published layout."""
    small_images.write_samples(tmp_path / "raw" / "All-Hist", "hdf5", np.int32)
    mark(tmp_path / "raw", {"kind": "test"})
    return tmp_path / "raw"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("*/*")}


def test_published_files_become_pairs_with_labels_of_one_byte(published, tmp_path):
    """Test the bytes of the header, too: other programs read these files at a fixed offset."""
    made = prepare(published, tmp_path / "data")
    assert made.counts == {"train_samples": 8, "eval_samples": 5, "height": 4, "width": 6}
    for folder, count in small_images.COUNTS.items():
        for number in range(count):
            x, y = small_images.sample(number + 100 * (folder == "validation"))
            for name, values in (("data", x), ("label", y)):
                found = tmp_path / "data" / folder / f"{name}-s{number}.npy"
                np.save(tmp_path / "expected.npy", values)
                assert found.read_bytes() == (tmp_path / "expected.npy").read_bytes()
    statistics = (published / "All-Hist" / "stats.h5").read_bytes()
    assert (tmp_path / "data" / "stats.h5").read_bytes() == statistics
    verify(tmp_path / "data")


def test_other_statistics_are_other_raw_data(published, tmp_path):
    """The images do not show it: all files have the same sizes."""
    prepare(published, tmp_path / "data")
    small_images.write_statistics(published / "All-Hist", high=small_images.HIGH + 1)
    with pytest.raises(DataError, match="was prepared from other raw data"):
        prepare(published, tmp_path / "data")


def faulty(file: h5py.File, fault: str) -> None:
    group = file["climate"]
    x, y = group["data"][:], group["labels_0"][:]
    if fault == "label 3":
        group["labels_0"][1, 2] = 3
    elif fault == "infinite":
        group["data"][1, 2, 7] = np.inf
    elif fault == "no labels":
        del group["labels_0"]
    elif fault == "labels of another size":
        del group["labels_0"]
        group["labels_0"] = y[:, :5]
    elif fault == "3 axes of pixels":
        del group["labels_0"], group["data"]
        group["labels_0"], group["data"] = y[None], x[None]
    else:
        del group["data"]
        group["data"] = {"15 channels": x[..., :15], "integers": x.astype(np.int32), "2 axes": x[0]}[fault]


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("label 3", r"a label is 3; classes are 0 to 2"),
        ("infinite", "a value is not finite"),
        ("no labels", "labels_0"),
        ("labels of another size", r"climate/labels_0 has the shape \(4, 5\); expected"),
        ("15 channels", r"climate/data is float32 of shape \(4, 6, 15\), .* expected are float32 of \(H, W, 16\) and "),
        ("integers", r"climate/data is int32 of shape"),
        ("2 axes", r"climate/data is float32 of shape \(6, 16\)"),
        (
            "3 axes of pixels",
            r"climate/data is float32 of shape \(1, 4, 6, 16\), climate/labels_0 has the shape \(1, 4, 6\)",
        ),
    ],
)
def test_another_hdf5_file_is_no_sample(fault, complaint, published, tmp_path):
    path = published / "All-Hist" / "validation" / "data-s2.h5"
    with h5py.File(path, "r+") as file:
        faulty(file, fault)
    with pytest.raises(DataError, match=rf"^{path} is no readable sample: .*{complaint}.*; fetch the file again$"):
        prepare(published, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_truncated_hdf5_file_is_refused(published, tmp_path):
    path = published / "All-Hist" / "train" / "data-s2.h5"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(DataError, match=rf"^{path} is no readable sample: "):
        prepare(published, tmp_path / "data")


def test_a_pipe_is_no_sample(published, tmp_path):
    """HDF5's library would wait for its writer."""
    path = published / "All-Hist" / "validation" / "data-s2.h5"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match=rf"^{path}: is a pipe, no regular file"):
        prepare(published, tmp_path / "data")


def test_published_images_of_another_size_are_refused(published, tmp_path):
    path = published / "All-Hist" / "validation"
    small_images.write_sample(path, "hdf5", "s3", *small_images.sample(3, (6, 4)))
    with pytest.raises(DataError, match=rf"^{path}/data-s3\.h5 has 6 x 4 pixels, the first image 4 x 6; all must"):
        prepare(published, tmp_path / "data")


@pytest.mark.parametrize("command", [prepare, adopt])
@pytest.mark.parametrize(
    ("lost", "complaint"),
    [
        ("stats.h5", r"/All-Hist/stats\.h5 is missing: it has the range of every channel"),
        ("validation", r"/All-Hist/validation has no (samples: neither data-\*\.npy nor datalabel-|data-\*\.h5)"),
    ],
)
def test_incomplete_data_are_refused(command, lost, complaint, tmp_path):
    root = small_images.write_samples(tmp_path / "All-Hist", "hdf5" if command is prepare else "pair")
    (root / lost).rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=complaint):
        command(root, tmp_path / "data")


def test_a_channel_without_a_range_is_refused_by_the_preparation(published, tmp_path):
    small_images.write_statistics(published / "All-Hist", high=small_images.LOW)
    with pytest.raises(DataError, match=r"stats\.h5 has no range of 16 channels: channel 0 has the range"):
        prepare(published, tmp_path / "data")


@pytest.mark.parametrize("kind", ["pair", "fused"])
def test_adopted_samples_are_links(kind, tmp_path):
    root = small_images.write_samples(tmp_path / "theirs", kind)
    for folder in small_images.COUNTS:
        (root / folder / "files_data.lst").write_text("data-s0.npy\n")
    before = {**contents(root), "stats.h5": (root / "stats.h5").read_bytes()}
    made = adopt(root, tmp_path / "data")
    assert made.counts == {"train_samples": 8, "eval_samples": 5, "height": 4, "width": 6}
    for name in before:
        if not name.endswith(".lst"):
            assert (tmp_path / "data" / name).samefile(root / name)
    assert {**contents(root), "stats.h5": (root / "stats.h5").read_bytes()} == before
    verify(tmp_path / "data")


def test_a_folder_can_be_adopted_in_place(tmp_path):
    root = small_images.write_samples(tmp_path / "theirs", "fused")
    before = contents(root)
    adopt(root, root)
    assert contents(root).items() >= before.items()
    assert adopt(root, root) == verify(root)


@pytest.mark.parametrize("fault", ["size", "label", "infinite", "type"])
def test_a_faulty_sample_is_not_adopted(fault, tmp_path):
    root = small_images.write_samples(tmp_path / "theirs", "pair")
    x, y = small_images.sample(4, (6, 4) if fault == "size" else small_images.SIZE)
    if fault == "label":
        y[0] = 7
    elif fault == "infinite":
        x[3, 5, 15] = -np.inf
    dtype = np.uint8 if fault == "type" else np.float32
    small_images.write_sample(root / "validation", "pair", "s4", x, y.astype(dtype))
    name, complaint = {
        "size": ("data", r"float32 of shape \(6, 4, 16\)"),
        "label": ("label", "a label is 7"),
        "infinite": ("data", "a value is not finite"),
        "type": ("data", r"labels of another type of numbers than in data-s0\.npy"),
    }[fault]
    with pytest.raises(DataError, match=rf"^{root}/validation/{name}-s4\.npy: {complaint}"):
        adopt(root, root)
    assert not (root / "manifest.json").exists()


def test_a_first_file_without_an_image_is_not_adopted(tmp_path):
    root = small_images.write_samples(tmp_path / "theirs", "pair")
    (root / "train" / "data-s0.npy").write_bytes(b"text")
    with pytest.raises(DataError, match=rf"^{root}/train/data-s0\.npy is no image \(H, W, C\): the magic bytes"):
        adopt(root, root)


@pytest.mark.parametrize(("kind", "name"), [("pair", "data"), ("pair", "label"), ("fused", "datalabel")])
def test_verify_reads_every_file_of_a_sample(kind, name, tmp_path):
    """The manifest has checksums of the lists only, which have those of the samples."""
    root = small_images.prepared(tmp_path / "data", kind)
    path = root / "validation" / f"{name}-s4.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 3]))
    first = path.with_name(path.name.replace("label-", "data-") if kind == "pair" else path.name)
    with pytest.raises(DataError, match=rf"^{first}: CRC-32 [0-9a-f]{{8}} where {LIST} says [0-9a-f]{{8}}; "):
        verify(root)


def test_other_numbers_of_samples_are_not_the_benchmark(published, tmp_path):
    for path in published.rglob("SYNTHETIC"):
        path.unlink()
    assert prepare(published, tmp_path / "data").custom == "train_samples is 8, published is 121266"


def test_synthetic_statistics_are_those_of_the_training_set(tmp_path):
    generate(tmp_path / "raw", SyntheticImages(train=3, eval=2, height=16, width=32))
    images = [raw.read_sample(path)[0].reshape(-1, 16) for path in (tmp_path / "raw" / "train").iterdir()]
    values = np.concatenate(images).astype(np.float64)
    expected = {"mean": values.mean(0), "sqmean": (values**2).mean(0), "minval": values.min(0), "maxval": values.max(0)}
    with h5py.File(tmp_path / "raw" / "stats.h5") as file:
        assert file["climate/count"][()] == len(values) == 3 * 16 * 32
        for name, value in expected.items():
            assert np.allclose(file["climate"][name], value, rtol=1e-12)


def test_synthetic_classes_have_their_shares_and_follow_from_four_variables():
    """The same thresholds hold for all images, so a network can learn them. A cyclone hides a river."""
    options, random = SyntheticImages(height=64, width=96, cyclones=0.05, rivers=0.1), np.random.default_rng(0)
    drawn = [draw(options, random) for _ in range(40)]
    field_PC = (np.concatenate([x.reshape(-1, 16) for x, _ in drawn]) - OFFSETS) / SPREADS
    y_P = np.concatenate([y.reshape(-1) for _, y in drawn])
    assert field_PC.mean(0) == pytest.approx(np.zeros(16), abs=1e-3)
    assert field_PC.var(0) == pytest.approx(np.ones(16), rel=0.2)
    cyclone_P = field_PC[:, 0] + field_PC[:, 1] > np.sqrt(2) * norm.isf(0.05)
    river_P = field_PC[:, 2] + field_PC[:, 3] > np.sqrt(2) * norm.isf(0.1)
    assert (cyclone_P & river_P).any()
    assert np.mean(y_P != np.where(cyclone_P, 1, np.where(river_P, 2, 0))) < 1e-4  # rounding to float32
    assert [np.mean(y_P == 1), np.mean(y_P == 2)] == pytest.approx([0.05, 0.095], rel=0.3)


def test_synthetic_fields_are_smooth():
    """Neighbours are so similar that a quarter of the resolution shows the classes."""
    x_HWC, _ = draw(SyntheticImages(height=64, width=96), np.random.default_rng(0))
    normal_HWC = (x_HWC - x_HWC.mean((0, 1))) / x_HWC.std((0, 1))
    for axis in (0, 1):
        assert np.abs(np.diff(normal_HWC, axis=axis)).mean() < 0.3
