"""Preparation of OpenImages: the reference's JSON field by field, columns that equal it, pictures byte by byte."""

import json
import shutil

import numpy as np
import pytest

from benchmarks.retinanet import prepare as preparing
from benchmarks.retinanet.prepare import COMMANDS, prepare, verify
from benchmarks.retinanet.prepared import open_prepared
from common.data import manifest
from common.data.preparation import assets_of
from common.detection.annotations import read_coco
from common.errors import DataError
from tests.benchmarks.retinanet.small_pictures import label, row, smooth, write_raw

TREE = label(264)
ROWS = {
    "train": [
        row("b7", label(2), "0.25,0.5,0,1", "1,0,0,0,1"),
        row("a3", label(0), "0.1,0.4,0.2,0.3", "0,0,1,0,0"),
        row("ff", TREE, "0,0.5,0,0.5"),
        row("b7", label(0), "0.5,0.75,0.125,1.0", "0,0,-1,0,0"),
        row("b7", TREE, "0,1,0,1"),
        row("a3", label(1), "0,1,0,0.5"),
    ],
    "validation": [row("d1", label(1), "0,1,0,1"), row("c9", label(1), "0.5,0.5,0,1")],
}
PICTURES = {
    "train": {"a3": smooth(40, 60, 1), "b7": smooth(80, 32, 2), "ff": smooth(20, 20, 3)},
    "validation": {"d1": smooth(30, 30, 4), "c9": smooth(24, 48, 5), "unused": b"no picture at all"},
}


@pytest.fixture
def folders(tmp_path):
    raw_dir = write_raw(tmp_path / "raw", ROWS, PICTURES)
    (raw_dir / "backbone.pth").write_bytes(b"weights")
    return raw_dir, tmp_path / "data"


def test_the_json_is_what_the_references_script_makes(folders):
    prepare(*folders)
    made = json.loads((folders[1] / "train/labels/openimages-mlperf.json").read_text())
    nothing = {"license": None, "coco_url": None}
    assert made["images"] == [
        {"id": 1, "file_name": "a3.jpg", "height": 40, "width": 60, **nothing},
        {"id": 2, "file_name": "b7.jpg", "height": 80, "width": 32, **nothing},
    ]
    assert made["categories"] == [
        {"id": 0, "name": "Airplane", "supercategory": None},
        {"id": 1, "name": "Antelope", "supercategory": None},
        {"id": 2, "name": "Apple", "supercategory": None},
    ]
    flags = dict.fromkeys(("IsOccluded", "IsTruncated", "IsGroupOf", "IsDepiction", "IsInside"), False)
    bbox = [0.1 * 60, 0.2 * 40, (0.4 - 0.1) * 60, (0.3 - 0.2) * 40]
    assert made["annotations"] == [
        {
            "id": 1, "image_id": 1, "category_id": 0, "bbox": bbox, "area": bbox[2] * bbox[3], "iscrowd": 1,
            **flags, "IsGroupOf": True,
        },
        {"id": 2, "image_id": 1, "category_id": 1, "bbox": [0, 0, 60, 20], "area": 1200, "iscrowd": 0, **flags},
        {
            "id": 3, "image_id": 2, "category_id": 2, "bbox": [8, 0, 8, 80], "area": 640, "iscrowd": 0,
            **flags, "IsOccluded": True, "IsInside": True,
        },
        {
            "id": 4, "image_id": 2, "category_id": 0, "bbox": [16, 10, 8, 70], "area": 560, "iscrowd": 1,
            **flags, "IsGroupOf": True,
        },
    ]  # fmt: skip
    validation = json.loads((folders[1] / "validation/labels/openimages-mlperf.json").read_text())
    assert [(image["id"], image["file_name"]) for image in validation["images"]] == [(1, "c9.jpg"), (2, "d1.jpg")]


def test_real_data_have_category_ids_from_0_to_263(tmp_path):
    raw_dir = write_raw(tmp_path / "raw", ROWS, PICTURES, classes=None)
    made = prepare(raw_dir, tmp_path / "data")
    assert (made.synthetic, made.counts["classes"]) == (False, 264)
    content = json.loads((tmp_path / "data/train/labels/openimages-mlperf.json").read_text())
    assert [category["id"] for category in content["categories"]] == list(range(264))


@pytest.mark.parametrize(("ours", "folder"), [("train", "train"), ("eval", "validation")])
def test_columns_equal_the_json(folders, ours, folder):
    prepare(*folders)
    from_json = read_coco(folders[1] / folder / "labels/openimages-mlperf.json", names=True)
    split = open_prepared(folders[1]).split(ours)
    for name, column in vars(from_json).items():
        if name == "segmentations":
            continue
        found = getattr(split.annotations, name)
        assert found.dtype == column.dtype, name
        assert np.array_equal(found, column), name
    sizes = [len(PICTURES[folder][name.decode().removesuffix(".jpg")]) for name in split.names]
    assert split.file_bytes.tolist() == sizes


def test_pictures_keep_their_bytes(folders):
    raw_dir, data_dir = folders
    prepare(raw_dir, data_dir)
    for split, names in (("train", ["a3", "b7"]), ("validation", ["c9", "d1"])):
        found = {path.stem: path.read_bytes() for path in (data_dir / split / "data").iterdir()}
        assert found == {name: PICTURES[split][name] for name in names}
        assert (data_dir / split / f"data/{names[0]}.jpg").samefile(raw_dir / split / f"{names[0]}.jpg")


def test_the_manifest_counts_and_names_all_but_the_pictures(folders):
    made = prepare(*folders)
    assert made.counts == {"classes": 3, "train_samples": 2, "train_boxes": 4, "eval_samples": 2, "eval_boxes": 2}
    assert made.synthetic
    there = {path.relative_to(folders[1]).as_posix() for path in folders[1].rglob("*") if path.is_file()}
    assert {name for name in there if not name.endswith(".jpg")} == {*made.files, "manifest.json", "prepare.lock"}


def test_the_backbone_is_placed_beside_the_data(folders, tmp_path):
    prepare(*folders)
    placed = assets_of(folders[1]) / "backbone.pth"
    assert placed.read_bytes() == b"weights"
    prepare(*folders, assets_dir=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere/backbone.pth").samefile(folders[0] / "backbone.pth")
    placed.unlink()
    placed.write_bytes(b"others")
    with pytest.raises(DataError, match=r"backbone.pth is another file than .*; delete .*data-assets or name another"):
        prepare(*folders)


def test_a_picture_that_got_lost_meanwhile_is_placed_again(folders, monkeypatch):
    raw_dir, data_dir = folders
    monkeypatch.setattr(preparing, "write_coco", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(raw_dir, data_dir)
    monkeypatch.undo()
    (data_dir / "train/data/a3.jpg").unlink()
    prepare(raw_dir, data_dir)
    verify(data_dir)


@pytest.mark.slow
def test_processes_make_what_one_makes(folders, tmp_path, monkeypatch):
    alone = prepare(*folders)
    monkeypatch.setattr(preparing, "TASK", 1)
    assert prepare(folders[0], tmp_path / "other", workers=2).files == alone.files


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (PICTURES["train"]["a3"][:-40], "truncated"),
        (PICTURES["train"]["a3"][:100], "Truncated|cannot identify"),
        (b"", "cannot identify"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "cannot identify"),
    ],
    ids=["its end is missing", "nearly all is missing", "empty", "another format"],
)
def test_a_picture_that_is_no_whole_jpeg_is_named(folders, data, reason):
    (folders[0] / "train/a3.jpg").write_bytes(data)
    with pytest.raises(DataError, match=rf"train/a3\.jpg: no whole JPEG: .*({reason}).*download it again"):
        prepare(*folders)


def test_bytes_behind_the_end_of_a_jpeg_are_none_of_ours(folders):
    (folders[0] / "train/a3.jpg").write_bytes(PICTURES["train"]["a3"] + bytes(5000))
    prepare(*folders)
    assert open_prepared(folders[1]).split("train").annotations.picture_width.tolist() == [60, 32]


def test_missing_pictures_are_counted_and_named(folders):
    (folders[0] / "validation/d1.jpg").unlink()
    with pytest.raises(DataError, match=r"raw/validation lacks 1 of 2 pictures, such as d1\.jpg"):
        prepare(*folders)
    shutil.rmtree(folders[0] / "train")
    with pytest.raises(DataError, match=r"raw/train lacks 2 of 2 pictures, such as a3\.jpg, b7\.jpg"):
        prepare(*folders)


def changed(path):
    """Another picture of the same size in the place of ``path``, which may be a hard link."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-10] + bytes(8) + data[-2:])


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("train/data/b7.jpg", changed, r"b7\.jpg is another picture than was prepared"),
        ("validation/data/c9.jpg", lambda path: path.unlink(), r"c9\.jpg: the picture cannot be read: No such file"),
        ("train/data/x.jpg", lambda path: path.write_bytes(b""), r"x\.jpg was not prepared; delete it"),
        ("train/boxes/box_xywh.npy", changed, r"box_xywh\.npy: SHA-256"),
        ("train/boxes/box_area.npy", lambda path: path.unlink(), r"box_area\.npy is missing"),
        ("train/labels/openimages-mlperf.json", lambda path: path.write_text("{}"), r"mlperf\.json has 2 bytes where"),
    ],
)
def test_verify_finds_what_has_changed(folders, name, spoil, message):
    prepare(*folders)
    assert verify(folders[1], workers=2) == manifest.read(folders[1], "openimages-coco/1", "")
    spoil(folders[1] / name)
    with pytest.raises(DataError, match=message):
        verify(folders[1])


def test_the_commands_say_what_is_there(folders, capsys):
    raw_dir, data_dir = map(str, folders)
    COMMANDS.run("prepare", ["--raw-dir", raw_dir, "--data-dir", data_dir, "--workers", "1"])
    output = capsys.readouterr().out.splitlines()
    assert output == [
        f"{data_dir}: synthetic, classes 3, train_samples 2, train_boxes 4, eval_samples 2, eval_boxes 2",
        f"{data_dir}-assets: complete, for assets_dir",
    ]
    (folders[0] / "SYNTHETIC").unlink()
    (folders[0] / "backbone.pth").unlink()
    COMMANDS.run("prepare", ["--raw-dir", raw_dir, "--data-dir", f"{data_dir}2", "--workers", "1"])
    output = capsys.readouterr().out.splitlines()
    weights = "resnext50_32x4d-7cdf4587.pth"
    assert output[1] == f"{data_dir}2-assets: lacks {weights}; put it there, or give its folder as assets_dir"
    assert output[2].endswith("for the open division alone: train_samples is 2, published is 1170301")
