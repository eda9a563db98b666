"""Preparation of CosmoFlow's data: universes, the published TFRecords, adopted files, and synthetic samples."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import small_cubes
import torch

from benchmarks.cosmoflow import raw
from benchmarks.cosmoflow.prepare import COMMANDS, adopt, prepare, verify
from benchmarks.cosmoflow.samples import LIST, Split, encode, read_list
from benchmarks.cosmoflow.synthetic import draw
from common.data.synthetic import mark
from common.errors import ConfigError, DataError
from common.formats.raw_files import add_member
from common.formats.tfrecord import deflate

PARAMETERS = np.array([0.5, -0.25, 0.125, -1.0], np.float32)


def universe(path: Path, edge: int = 8, number: int = 0) -> np.ndarray:
    """Write a universe of ``edge`` voxels per axis, and return its counts."""
    full = np.random.default_rng(number).integers(0, 2**15, (edge, edge, edge, 4), np.int16)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["full"], file["unitPar"] = full, PARAMETERS
    return full


@pytest.fixture
def universes(tmp_path: Path) -> Path:
    """Return a folder of two universes, one for each split, in folders of their own."""
    universe(tmp_path / "raw" / "train" / "21688988" / "univ_a.hdf5")
    universe(tmp_path / "raw" / "validation" / "21688989" / "univ_b.hdf5", number=1)
    mark(tmp_path / "raw", {"kind": "test"})
    return tmp_path / "raw"


def read(root: Path, index: int, size: int, folder: str = "train") -> tuple[np.ndarray, np.ndarray]:
    x_DHWC, y = torch.empty((size, size, size, 4), dtype=torch.int16), torch.empty(4)
    Split(root / folder, read_list(root / folder / LIST), size, "buffered", checksums=True).read(index, x_DHWC, y)
    return x_DHWC.numpy(), y.numpy()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("*/*")}


def test_a_sample_of_the_benchmark_has_its_published_size():
    assert len(encode(np.zeros((128, 128, 128, 4), np.int16), PARAMETERS)) == 16_777_287


def test_a_universe_becomes_64_cubes_in_the_published_order(universes, tmp_path):
    """Number i counts along the last axis first: it is (i / 16, i / 4 % 4, i % 4)."""
    made = prepare(universes, tmp_path / "data")
    assert made.counts == {"train_samples": 64, "eval_samples": 64, "size": 2}
    names = [line.split()[0] for line in (tmp_path / "data" / "train" / LIST).read_text().splitlines()]
    assert names == [f"21688988_univ_a_{number:03d}.tfrecord" for number in range(64)]
    with h5py.File(universes / "train" / "21688988" / "univ_a.hdf5") as file:
        full = file["full"][:]
    for number in range(64):
        d, h, w = 2 * (number // 16), 2 * (number // 4 % 4), 2 * (number % 4)
        x, y = read(tmp_path / "data", number, 2)
        assert np.array_equal(x, full[d : d + 2, h : h + 2, w : w + 2])
        assert np.array_equal(y, PARAMETERS)


def test_a_universe_is_read_in_quarters(universes, tmp_path, monkeypatch):
    """A whole universe of the benchmark has 1.07 GB."""
    shapes, getitem = [], h5py.Dataset.__getitem__

    def noted(dataset: h5py.Dataset, index: object) -> np.ndarray:
        shapes.append((found := getitem(dataset, index)).shape)
        return found

    monkeypatch.setattr(h5py.Dataset, "__getitem__", noted)
    prepare(universes, tmp_path / "data")
    assert set(shapes) == {(2, 8, 8, 4)}


def faulty(file: h5py.File, fault: str) -> None:
    counts = file["full"][:]
    name, content = {
        "floats": ("full", counts.astype(np.float32)),
        "edges": ("full", counts[:4]),
        "redshifts": ("full", counts[..., :3]),
        "fewer than 4 voxels": ("full", counts[:3, :3, :3]),
        "five parameters": ("unitPar", np.zeros(5, np.float32)),
        "no parameters": ("unitPar", None),
    }[fault]
    del file[name]
    if content is not None:
        file[name] = content


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("floats", r"full is float32 of shape \(8, 8, 8, 4\), not int16"),
        ("edges", r"full is int16 of shape \(4, 8, 8, 4\), not int16 of three equal edges"),
        ("redshifts", r"full is int16 of shape \(8, 8, 8, 3\)"),
        ("fewer than 4 voxels", r"full is int16 of shape \(3, 3, 3, 4\)"),
        ("five parameters", r"unitPar has the shape \(5,\), not \(4,\)"),
        ("no parameters", "unitPar"),
    ],
)
def test_another_hdf5_file_is_no_universe(fault, complaint, universes, tmp_path):
    path = universes / "train" / "21688988" / "univ_a.hdf5"
    with h5py.File(path, "r+") as file:
        faulty(file, fault)
    with pytest.raises(DataError, match=rf"^{path} is no readable universe: .*({complaint})"):
        prepare(universes, tmp_path / "data")


def test_a_truncated_universe_is_refused(universes, tmp_path):
    path = universes / "train" / "21688988" / "univ_a.hdf5"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(DataError, match=rf"^{path} is no readable universe: "):
        prepare(universes, tmp_path / "data")


def test_the_published_tar_and_its_folders_give_the_same_files(tmp_path):
    """The tar is read in place. Its folder of tests and files of an operating system are ignored."""
    folders = small_cubes.write_samples(tmp_path / "raw", "gzip")
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / raw.TAR, "w") as tar:
        for name in ("validation", "train", "test"):
            source = folders / ("train" if name == "test" else name)
            tar.add(source, f"cosmoUniverse_2019_05_4parE_tf_v2/{name}")
        add_member(tar, "cosmoUniverse_2019_05_4parE_tf_v2/train/._s0.tfrecord", b"another file")
    mark(tmp_path / "packed", {"kind": "test"})
    made = [prepare(tmp_path / name, tmp_path / f"{name}-data") for name in ("raw", "packed")]
    assert made[0].source["fingerprint"] == made[1].source["fingerprint"]
    assert contents(tmp_path / "raw-data") == contents(tmp_path / "packed-data")
    assert [path.name for path in (tmp_path / "packed").iterdir()] == [raw.TAR, "SYNTHETIC"]


@pytest.mark.parametrize("kind", ["plain", "gzip"])
def test_a_published_record_is_kept_byte_for_byte(kind, tmp_path):
    prepare(small_cubes.write_samples(tmp_path / "raw", kind), tmp_path / "data")
    for number in range(small_cubes.COUNTS["train"]):
        made = tmp_path / "data" / "train" / f"s{number}.tfrecord"
        assert made.read_bytes() == encode(*small_cubes.cube(number))
        assert made.with_name(f"{made.name}.idx").read_text() == f"0 {made.stat().st_size}\n"


def test_a_truncated_tar_is_refused(tmp_path):
    folders = small_cubes.write_samples(tmp_path / "raw", "plain")
    with tarfile.open(tmp_path / raw.TAR, "w") as tar:
        tar.add(folders / "train", "train")
    os.truncate(tmp_path / raw.TAR, 2000)
    with pytest.raises(DataError, match=rf"^{tmp_path / raw.TAR}: the tar is truncated or damaged"):
        prepare(tmp_path, tmp_path / "data")


WHOLE = encode(*small_cubes.cube(5))
DAMAGES = {
    "cut off": (deflate(WHOLE)[:-20], "the gzip data end early"),
    "changed": (deflate(WHOLE[:-1] + b"?"), "the checksum of the record at byte 0 is wrong: .*"),
    "no cube": (encode(small_cubes.cube(5)[0][:3], PARAMETERS), "384 bytes are no cube of int16 values at 4 redshifts"),
    "too large": (bytes(2**26 + 1), "67,108,865 bytes are more than any sample has"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_published_sample_is_named(damage, tmp_path):
    path = small_cubes.write_samples(tmp_path / "raw", "gzip") / "train" / "s5.tfrecord"
    content, complaint = DAMAGES[damage]
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path}: s5\.tfrecord: {complaint}; fetch the file again$"):
        prepare(tmp_path / "raw", tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("command", ["prepare", "adopt"])
def test_cubes_of_several_sizes_are_refused(command, tmp_path):
    root = small_cubes.write_samples(tmp_path / "raw", "gzip")
    small_cubes.write_sample(root / "validation", "gzip", "s3", *small_cubes.cube(3, 2))
    says = r"s3\.tfrecord has 2\^3 voxels, the first sample 4\^3" if command == "prepare" else "a cube of 64 bytes; "
    with pytest.raises(DataError, match=says):
        {"prepare": prepare, "adopt": adopt}[command](root, tmp_path / "data")


def test_two_files_of_one_name_are_refused(universes, tmp_path):
    """The names of cubes have only the last folder of their universe."""
    universe(universes / "train" / "deeper" / "21688988" / "univ_a.hdf5")
    with pytest.raises(DataError, match=r"have samples of the same name 21688988_univ_a$"):
        prepare(universes, tmp_path / "data")


@pytest.mark.parametrize("kind", ["plain", "gzip", "npy"])
def test_adopted_samples_are_links(kind, tmp_path):
    """So are their labels or indexes."""
    root = small_cubes.write_samples(tmp_path / "theirs", kind)
    if kind == "plain":
        (root / "train" / "s2.tfrecord.idx").write_text("0 573\n")
    made = adopt(root, tmp_path / "data")
    assert made.counts == {"train_samples": 8, "eval_samples": 5, "size": 4}
    names = {path.name for path in (root / "train").iterdir()}
    assert {path.name for path in (tmp_path / "data" / "train").iterdir()} == {*names, LIST}
    for name in names:
        assert (tmp_path / "data" / "train" / name).samefile(root / "train" / name)
    verify(tmp_path / "data")


def test_a_folder_can_be_adopted_in_place(tmp_path):
    root = small_cubes.write_samples(tmp_path / "theirs", "gzip")
    before = contents(root)
    adopt(root, root)
    assert contents(root).items() >= before.items()
    assert adopt(root, root) == verify(root)


def test_a_damaged_sample_is_not_adopted(tmp_path):
    root = small_cubes.write_samples(tmp_path / "theirs", "plain")
    damaged = bytearray((root / "validation" / "s4.tfrecord").read_bytes())
    damaged[100] ^= 1
    (root / "validation" / "s4.tfrecord").write_bytes(damaged)
    with pytest.raises(DataError, match=r"validation/s4\.tfrecord: the checksum of the record at byte 0 is wrong"):
        adopt(root, root)
    assert not (root / "manifest.json").exists()


def test_a_label_of_another_size_is_not_adopted(tmp_path: Path) -> None:
    """Staging takes the size of the first label for all labels of a split. This one has a longer header."""
    root = small_cubes.write_samples(tmp_path / "theirs", "npy")
    label = root / "validation" / "s3_label.npy"
    content = label.read_bytes()
    label.write_bytes(content[:8] + (182).to_bytes(2, "little") + content[10:127] + b" " * 64 + content[127:])
    assert np.array_equal(np.load(label), small_cubes.cube(103)[1])
    with pytest.raises(DataError, match=r"validation/s3_label\.npy has another size than s0_label\.npy; fetch"):
        adopt(root, root)


@pytest.mark.parametrize("command", [verify, adopt], ids=["verify", "adopt"])
def test_the_index_of_another_file_is_refused(command, tmp_path):
    root = small_cubes.write_samples(tmp_path / "data", "plain")
    (root / "train" / "s2.tfrecord.idx").write_text("0 573\n")
    adopt(root, root)
    (root / "train" / "s2.tfrecord.idx").write_text("0 16777287\n")
    if command is adopt:
        (root / "manifest.json").unlink()
    arguments = (root, root) if command is adopt else (root,)
    with pytest.raises(DataError, match=r"s2\.tfrecord\.idx is the index of another file: line 1 is '0 16777287', not"):
        command(*arguments)


def test_verify_reads_every_sample(tmp_path):
    """The manifest has checksums of the lists only; those of the samples are in their records."""
    root = small_cubes.prepared(tmp_path / "data", "plain")
    path = root / "validation" / "s4.tfrecord"
    path.write_bytes(path.read_bytes()[:-30] + b"?" + path.read_bytes()[-29:])
    with pytest.raises(DataError, match=rf"^{path}: the checksum of the record at byte 0 is wrong"):
        verify(root)


def test_other_numbers_of_samples_are_not_the_benchmark(tmp_path):
    root = small_cubes.write_samples(tmp_path / "raw", "gzip")
    (root / "SYNTHETIC").unlink()
    assert prepare(root, tmp_path / "data").custom == "train_samples is 8, published is 524288"


def test_a_linear_function_of_means_and_deviations_recovers_all_targets():
    """So a network can learn them from small cubes. An estimate of 0 has the error 0.5."""
    random, features, targets = np.random.default_rng(0), [], []
    for _ in range(160):
        x_DHWC, y = draw(16, random)
        values = np.log1p(x_DHWC.reshape(-1, 4).astype(float))
        features.append([*values.mean(0), *values.std(0), 1])
        targets.append(y)
    weights, *_ = np.linalg.lstsq(features[:120], targets[:120], rcond=None)
    error = np.abs(np.array(features[120:]) @ weights - targets[120:]).mean(0)
    assert error.max() < 0.1


def test_clusters_make_counts_vary_more_than_poissons():
    """The variance of the last channel, whose mean is constant, exceeds its mean by the variance of the clustering."""
    random = np.random.default_rng(0)
    for x_DHWC, y in (draw(16, random) for _ in range(20)):
        last, deviation = x_DHWC[..., -1].astype(float), 0.3 + (y[-1] + 1) / 2
        assert abs(last.mean() - 4) < 0.2
        excess = (last.var() - last.mean()) / last.mean() ** 2
        assert 0.3 < excess / (np.exp(deviation**2) - 1) < 2.5


def test_an_odd_size_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--size=15: must be an even number"):
        COMMANDS.run("generate", ["--raw-dir", str(tmp_path / "raw"), "--size", "15"])
