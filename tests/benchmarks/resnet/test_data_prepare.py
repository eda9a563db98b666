"""From ImageNet's raw layouts to records: bytes, labels, interruptions, damage."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from benchmarks.resnet import raw
from benchmarks.resnet.prepare import COMMANDS, FILES, prepare
from benchmarks.resnet.synthetic import SyntheticImages, digit_plans, generate
from common import cli
from common.config.composition import compose
from common.errors import ConfigError, DataError
from common.formats.jpeg import jpeg_components, to_rgb_jpeg
from common.formats.recordio import RecordReader


def contents(data_dir):
    return {name: (data_dir / name).read_bytes() for name in FILES}


def jpeg(mode="RGB", colour=None, size=(20, 10), **options):
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def png():
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), (200, 30, 10)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def folders(tmp_path):
    """Three classes; b has a PNG in JPEG's clothes and a CMYK picture."""
    pictures = {
        "train/n03/c1.JPEG": jpeg(colour=(1, 2, 3)),
        "train/n01/a2.JPEG": jpeg(colour=(9, 9, 9)),
        "train/n01/a1.JPEG": jpeg("L", 77),
        "train/n02/b1.JPEG": png(),
        "train/n02/b2.JPEG": jpeg("CMYK", (10, 200, 30, 5)),
        "val/n02/v1.JPEG": jpeg(colour=(50, 60, 70)),
        "SYNTHETIC": b"a test",
    }
    for name, data in pictures.items():
        path = tmp_path / "raw" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "raw", pictures


def records(rec):
    with RecordReader(rec) as reader:
        return {record.record_id: record for record in map(reader.image, range(len(reader)))}


def test_labels_are_indices_of_sorted_synsets_and_ids_indices_of_sorted_pictures(folders, tmp_path):
    prepare(folders[0], tmp_path / "data")
    train = records(tmp_path / "data" / "train.rec")
    assert {number: record.labels for number, record in train.items()} == {
        0: (0.0,), 1: (0.0,), 2: (1.0,), 3: (1.0,), 4: (2.0,)
    }  # fmt: skip
    assert records(tmp_path / "data" / "val.rec")[0].labels == (1.0,)


def test_jpeg_bytes_go_through_unchanged(folders, tmp_path):
    raw_dir, pictures = folders
    prepare(raw_dir, tmp_path / "data")
    train = records(tmp_path / "data" / "train.rec")
    assert train[0].data == pictures["train/n01/a1.JPEG"]
    assert train[1].data == pictures["train/n01/a2.JPEG"]
    assert train[4].data == pictures["train/n03/c1.JPEG"]


def test_png_and_cmyk_become_rgb_jpeg_of_quality_100(folders, tmp_path):
    prepare(folders[0], tmp_path / "data")
    train = records(tmp_path / "data" / "train.rec")
    for number, colour in ((2, (200, 30, 10)), (3, (240, 54, 220))):
        with Image.open(io.BytesIO(train[number].data)) as picture:
            assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", (20, 10))
            assert set(picture.quantization[0]) == {1}  # quality 100 quantises by 1
            np.testing.assert_allclose(np.asarray(picture).mean(axis=(0, 1)), colour, atol=6)


@pytest.mark.parametrize(("mode", "components"), [("L", 1), ("RGB", 3), ("CMYK", 4)])
@pytest.mark.parametrize("progressive", [False, True])
def test_components_are_read_from_the_frame_header(mode, components, progressive):
    assert jpeg_components(jpeg(mode, progressive=progressive, comment=b"\xff\xc0" * 9)) == components


def test_stray_bytes_between_segments_change_nothing():
    plain = jpeg(colour=(1, 2, 3))
    second = 4 + int.from_bytes(plain[4:6], "big")  # behind APP0
    stray = plain[:second] + b"\x00\x07" + plain[second:]
    assert to_rgb_jpeg(stray) is stray


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8", b"GIF but not really", jpeg()[:20]], ids=["empty", "first bytes", "text", "cut off"]
)
def test_no_picture_is_an_error(data):
    with pytest.raises(ValueError, match=r"neither JPEG|without a frame header|no JPEG marker"):
        to_rgb_jpeg(data)


def test_damaged_picture_names_its_file(folders, tmp_path):
    (folders[0] / "train/n03/c1.JPEG").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"c1\.JPEG: n03/c1\.JPEG at byte 0: neither JPEG"):
        prepare(folders[0], tmp_path / "data")
    assert not (tmp_path / "data" / "train.rec").exists()


def test_tars_and_folders_give_the_same_records(tmp_path):
    for name, tars in (("folders", False), ("tars", True)):
        generate(tmp_path / name / "raw", SyntheticImages(train=40, val=20, tars=tars))
        prepare(tmp_path / name / "raw", tmp_path / name / "data", workers=2)
    assert contents(tmp_path / "tars" / "data") == contents(tmp_path / "folders" / "data")


def test_truncated_tar_is_an_error(tmp_path):
    generate(tmp_path, SyntheticImages(train=40, val=20, tars=True))
    tar = tmp_path / raw.TRAIN_TAR
    tar.write_bytes(tar.read_bytes()[:-20_000])
    with pytest.raises(DataError, match="truncated"):
        prepare(tmp_path, tmp_path / "data")


def test_a_development_kit_that_is_missing_or_empty_is_an_error(tmp_path):
    generate(tmp_path, SyntheticImages(train=40, val=20, tars=True))
    with tarfile.open(tmp_path / raw.DEVKIT_TAR, "w:gz"):
        pass
    with pytest.raises(DataError, match="damaged or no ILSVRC2012 development kit"):
        prepare(tmp_path, tmp_path / "data")
    (tmp_path / raw.DEVKIT_TAR).unlink()
    with pytest.raises(DataError, match="has no labels of its own"):
        prepare(tmp_path, tmp_path / "data")


def test_records_of_an_unknown_source_are_made_again(folders, tmp_path):
    prepare(folders[0], tmp_path / "data")
    (tmp_path / "data" / "manifest.json").unlink()
    (folders[0] / "train/n01/a1.JPEG").write_bytes(jpeg("L", 78))
    prepare(folders[0], tmp_path / "data")
    assert records(tmp_path / "data" / "train.rec")[0].data == jpeg("L", 78)


def test_training_records_are_shuffled_and_validation_records_are_not(digits):
    with RecordReader(digits / "train.rec") as train, RecordReader(digits / "val.rec") as val:
        assert train.ids.tolist() != sorted(train.ids.tolist()) == list(range(61))
        assert val.ids.tolist() == list(range(23))


def test_missing_split_is_named(folders, tmp_path):
    (folders[0] / "val/n02/v1.JPEG").unlink()
    with pytest.raises(DataError, match=r"no val pictures: neither ILSVRC2012_img_val\.tar"):
        prepare(folders[0], tmp_path / "data")


def test_class_of_validation_alone_is_refused(folders, tmp_path):
    (folders[0] / "val/n02").rename(folders[0] / "val/n09")
    with pytest.raises(DataError, match="n09, a class without training pictures"):
        prepare(folders[0], tmp_path / "data")


def test_missing_raw_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        prepare(tmp_path / "nowhere", tmp_path / "data")


def test_incomplete_imagenet_cannot_pass_as_imagenet(folders, tmp_path):
    (folders[0] / "SYNTHETIC").unlink()
    with pytest.raises(DataError, match=r"where ImageNet has .*1281167"):
        prepare(folders[0], tmp_path / "data")


def test_the_manifest_names_synthetic_data_and_counts(digits):
    raw_manifest = json.loads((digits / "manifest.json").read_text())
    assert raw_manifest["synthetic"] is True
    assert raw_manifest["counts"] == {"train_samples": 61, "eval_samples": 23, "classes": 10}


def test_digits_are_the_fixed_split_of_scikit_learn(tmp_path):
    plans = digit_plans(SyntheticImages())
    numbers = {split: {plan.number for plan in plans[split]} for split in plans}
    assert (len(numbers["train"]), len(numbers["val"])) == (1437, 360)
    assert not numbers["train"] & numbers["val"]
    per_class = np.bincount([plan.label for plan in plans["val"]])
    assert per_class.min() >= 34
    assert per_class.max() <= 37


def test_imagenet_sized_pictures_have_imagenet_s_forms(tmp_path):
    made = generate(tmp_path / "raw", SyntheticImages("imagenet-sized", train=120, val=8))
    sizes, subsampling = [], set()
    for path in sorted((tmp_path / "raw" / "train").rglob("*.JPEG")):
        with Image.open(path) as picture:
            sizes.append(picture.size)
            subsampling.add(picture.layer[0][1:3])  # sampling factors of luma; chroma has 1 x 1
    assert max(max(size) for size in sizes) > 5000
    assert len(set(sizes)) > 100
    assert subsampling == {(2, 2)}
    assert made.startswith("120 training and 8 validation pictures of 120 classes, ")


def test_same_seed_draws_the_same_pictures(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        generate(tmp_path / name, SyntheticImages("imagenet-sized", train=3, val=1, seed=seed))
    a, b, c = ([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.JPEG"))] for name in ("a", "b", "c"))
    assert a == b
    assert all(x != y for x, y in zip(a, c, strict=True))


def test_generate_refuses_too_many_digits(tmp_path):
    with pytest.raises(ConfigError, match="10 to 1437 handwritten digits"):
        generate(tmp_path / "new", SyntheticImages(train=2000))


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_without_folders_the_data_are_prepared_where_training_reads_them(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLPERF_DATA_DIR", raising=False)
    if folder:
        monkeypatch.setenv("MLPERF_DATA_DIR", str(tmp_path / folder))
    read_from = cli.load(compose(["benchmark=resnet", "scale=8xH200"]))[1].data_dir
    assert COMMANDS.run("generate", ["--train", "20", "--val", "10", "--workers", "1"]) == 0
    root = tmp_path / (folder or "data")
    assert COMMANDS.run("prepare", ["--raw-dir", str(root / "resnet-synthetic-raw"), "--workers", "1"]) == 0
    assert COMMANDS.run("verify", []) == 0
    assert (read_from / "train.rec").exists()
    assert {path.name for path in root.iterdir()} == {"resnet", "resnet-synthetic-raw"}
