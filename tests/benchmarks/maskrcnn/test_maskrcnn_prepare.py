"""COCO's raw layout, and what is prepared from it, against what pycocotools reads in the same files."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from small_coco import SYNTHETIC

from benchmarks.maskrcnn.caffe2_backbone import load_backbone
from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.prepare import COMMANDS, prepare
from benchmarks.maskrcnn.prepared import legacy_corners, open_prepared
from common.detection.coco_raw import SPLITS
from common.detection.coco_synthetic import category_ids
from common.errors import ConfigError, DataError
from common.formats.recordio import RecordReader
from common.mlperf.fixed import fixed_facts
from common.nn.resnet import FrozenNorm, ResNetShape, ResNetTrunk
from tests.common.detection.raw_coco import annotations, changed


def trained_on(coco: COCO) -> dict[int, list[dict[str, Any]]]:
    """Objects of each training picture by the reference's rules, one box at a time, in the order of the file."""
    found = {}
    for picture in sorted(coco.imgs):
        boxes = sorted((coco.anns[number] for number in coco.getAnnIds(picture)), key=lambda box: box["id"])
        if not boxes or all(min(box["bbox"][2:]) <= 1 for box in boxes):
            continue
        found[picture] = []
        for box in boxes:
            x1, y1, x2, y2 = corners(box["bbox"], coco.imgs[picture])
            if not box["iscrowd"] and x2 > x1 and y2 > y1:
                found[picture].append(box)
    return found


def corners(xywh: list[float], picture: dict[str, Any]) -> list[float]:
    x, y, width, height = xywh
    ends = [(x, picture["width"]), (y, picture["height"])]
    ends += [(x + max(width - 1, 0), picture["width"]), (y + max(height - 1, 0), picture["height"])]
    return [min(max(value, 0), side - 1) for value, side in ends]


# What is generated


def test_generated_data_have_what_cocos_have(drawn):
    for split, count in (("train", SYNTHETIC.train + 2), ("val", SYNTHETIC.eval)):
        coco = annotations(drawn, split)
        assert len(coco.imgs) == count
        assert sorted(coco.cats) == category_ids(12)
        kinds = {picture: [box["iscrowd"] for box in coco.imgToAnns[picture]] for picture in coco.imgs}
        assert [1] in kinds.values(), "a picture with nothing but a crowd"
        assert [] in kinds.values(), "a picture without an object"
        for picture in coco.imgs.values():
            with Image.open(drawn / SPLITS[split] / picture["file_name"]) as opened:
                assert opened.size == (picture["width"], picture["height"])
        for box in coco.anns.values():
            assert isinstance(box["segmentation"], dict if box["iscrowd"] else list)
    coco = annotations(drawn, "train")
    assert {len(box["segmentation"]) for box in coco.anns.values() if not box["iscrowd"]} >= {1, 2, 3, 4}
    assert min(picture["height"] / picture["width"] for picture in coco.imgs.values()) < 0.4
    assert sum(min(box["bbox"][2:]) <= 1 for box in coco.anns.values()) >= 2


def test_generated_areas_are_those_of_the_masks(drawn):
    coco = annotations(drawn, "val")
    compared = [
        (box["area"], int(coco_mask.area(coco.annToRLE(box)))) for box in coco.anns.values() if box["area"] > 30
    ]
    assert len(compared) > 5
    for recorded, found in compared:
        assert abs(recorded - found) <= 4 + 3 * np.sqrt(recorded), "a share of the pixels of the outline"
    for box in coco.anns.values():
        if box["iscrowd"]:
            assert box["area"] == int(coco_mask.area(coco.annToRLE(box)))


def test_the_generated_backbone_fits_the_pictures(drawn):
    trunk = ResNetTrunk(ResNetShape((1, 1, 1, 1), 8, True, FrozenNorm(0.0, 3), stride_in_1x1=True))
    load_backbone(drawn / "R-50.pkl", trunk)
    mean = torch.tensor(fixed_facts(Facts, "maskrcnn").mean)
    squares = [
        np.asarray(Image.open(path).convert("RGB").resize((64, 64), Image.Resampling.BILINEAR))[..., ::-1].copy()
        for path in sorted((drawn / "train2017").iterdir())[:8]
    ]
    image = (torch.tensor(np.stack(squares)).float() - mean).permute(0, 3, 1, 2)
    with open(drawn / "R-50.pkl", "rb") as file:
        arrays = {name: torch.tensor(values) for name, values in pickle.load(file)["blobs"].items()}
    first = torch.nn.functional.conv2d(image, arrays["conv1_w"], stride=2, padding=3)
    first = first * arrays["res_conv1_bn_s"].view(-1, 1, 1) + arrays["res_conv1_bn_b"].view(-1, 1, 1)
    torch.testing.assert_close(first.mean((0, 2, 3)), torch.zeros(8), rtol=0, atol=1e-3)
    torch.testing.assert_close(first.std((0, 2, 3)), torch.ones(8), rtol=0, atol=1e-3)
    assert {"conv1_w", "res_conv1_bn_s", "res2_0_branch1_w", "res5_0_branch2c_bn_b"} <= arrays.keys()


@pytest.mark.parametrize(
    "changes",
    [{"train": 0}, {"classes": 0}, {"classes": 10_000}, {"sides": (80, 70)}, {"sides": (80, 641)}],
)
def test_what_cannot_be_generated_is_refused(changes):
    with pytest.raises(ConfigError):
        dataclasses.replace(SYNTHETIC, **changes)


# What is prepared


def test_training_has_the_reference_objects_with_their_outlines(drawn, prepared):
    coco = annotations(drawn, "train")
    expected = trained_on(coco)
    assert len(expected) == SYNTHETIC.train < len(coco.imgs) - 1
    assert [] in expected.values(), "a picture with nothing to train on"
    pictures, objects = open_prepared(prepared).train()
    polygons = open_prepared(prepared).table()
    label_of = {category: index + 1 for index, category in enumerate(sorted(coco.cats))}
    assert pictures.annotations.picture_id.tolist() == list(expected)
    assert objects.counts.tolist() == [len(boxes) for boxes in expected.values()]
    assert objects.corners.dtype == polygons.xy.dtype == np.float32
    row = 0
    for index, (picture, boxes) in enumerate(expected.items()):
        info = coco.imgs[picture]
        assert objects.size[index].tolist() == [info["height"], info["width"]]
        assert objects.bounds[index] == row
        assert pictures.record(index).data == (drawn / "train2017" / info["file_name"]).read_bytes()
        for box in boxes:
            np.testing.assert_allclose(objects.corners[row], corners(box["bbox"], info), rtol=1e-6)
            assert objects.label[row] == label_of[box["category_id"]]
            parts = polygons.of_object(row)
            assert len(parts) == len(box["segmentation"])
            for mine, coordinates in zip(parts, box["segmentation"], strict=True):
                assert np.array_equal(mine.reshape(-1), np.float32(coordinates))
            row += 1
    assert row == objects.bounds[-1] == polygons.objects == len(objects.label)
    pictures.close()


def test_validation_has_all_objects_whose_masks_are_pycocotools(drawn, prepared):
    coco, found = annotations(drawn, "val"), open_prepared(prepared)
    truth = found.truth()
    boxes = list(coco.anns.values())
    assert truth.picture_id.tolist() == sorted(coco.imgs)
    assert truth.box_picture.tolist() == [box["image_id"] for box in boxes]
    assert truth.box_class.tolist() == [box["category_id"] for box in boxes]
    assert truth.box_crowd.tolist() == [bool(box["iscrowd"]) for box in boxes]
    assert truth.box_area.tolist() == [box["area"] for box in boxes]
    assert truth.segmentations.has_runs().tolist() == truth.box_crowd.tolist()
    assert truth.box_crowd.any()
    for number, box in enumerate(boxes):
        picture = coco.imgs[box["image_id"]]
        size = picture["height"], picture["width"]
        rle = coco_mask.frPyObjects(truth.segmentations.coco(number, *size), *size)
        assert (coco_mask.merge(rle) if isinstance(rle, list) else rle) == coco.annToRLE(box)
    assert found.category_ids() == sorted(coco.cats)
    pictures = found.validation()
    assert len(pictures) == found.samples("val") == SYNTHETIC.eval
    assert pictures.size(0) == tuple(coco.imgs[min(coco.imgs)][side] for side in ("width", "height"))
    pictures.close()


def test_the_manifest_counts_what_device_tables_store(prepared):
    found = open_prepared(prepared)
    table, counts = found.table(), found.manifest.counts
    assert [counts[f"train_{what}"] for what in ("objects", "polygons", "points", "runs")] == [
        table.objects,
        table.polygons,
        table.points,
        0,
    ]
    assert counts["train_longest_side"] == SYNTHETIC.sides[1]
    assert found.synthetic
    assert COMMANDS.verify(prepared).counts == counts


def test_the_commands_work_together(tmp_path, capsys):
    folders = ["--raw-dir", str(tmp_path / "raw")]
    small = "--train 3 --eval 1 --classes 3 --sides 48 64 --boxes 2 --width 4 --layers 1 1 1 1 --image-size 48"
    assert COMMANDS.run("generate", [*folders, "--workers", "1", *small.split()]) == 0
    assert COMMANDS.run("prepare", [*folders, "--data-dir", str(tmp_path / "data"), "--workers", "1"]) == 0
    assert COMMANDS.run("verify", ["--data-dir", str(tmp_path / "data")]) == 0
    output = capsys.readouterr().out
    assert "train: 5 pictures" in output
    assert "synthetic, train_samples 3, eval_samples 1, classes 3, train_objects" in output
    assert f"{tmp_path / 'data-assets'}: complete, for assets_dir" in output


# Boxes of the older arithmetic


def test_corners_are_of_pixels_within_the_picture():
    xywh = np.array([[0, 0, 10, 8], [2.5, 1, 0.5, 1], [18, 5, 10, 10], [-3, -2, 5, 30], [25, 3, 4, 4]], np.float64)
    expected = [[0, 0, 9, 7], [2.5, 1, 2.5, 1], [18, 5, 19, 11], [0, 0, 1, 11], [19, 3, 19, 6]]
    found = legacy_corners(xywh, np.tile([12, 20], (5, 1)))
    assert found.dtype == np.float32
    assert found.tolist() == expected


# Bad data


def crowd(content: dict[str, Any]) -> dict[str, Any]:
    return next(box for box in content["annotations"] if box["iscrowd"])


def ordinary(content: dict[str, Any]) -> dict[str, Any]:
    return next(box for box in content["annotations"] if not box["iscrowd"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: ordinary(c).update(segmentation=[[1, 1, 5, 5]]), "'segmentation' is .* at least 3 points"),
        (lambda c: crowd(c)["segmentation"].update(size=[3, 4]), "'segmentation' is .* run lengths of 'size'"),
        (lambda c: c["images"][0].update(width=641), "is 641 x .* 640 px at most"),
        (
            lambda c: crowd(c).update(iscrowd=0),
            "picture .* has an object with run lengths, which only boxes around many",
        ),
    ],
    ids=["two points", "another size", "too large", "runs of one object"],
)
def test_bad_annotations_are_one_error(drawn, tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        prepare(changed(drawn, tmp_path / "raw", change), tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_data_of_another_format_are_refused(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "data")
    content = json.loads((tmp_path / "data" / "manifest.json").read_text())
    (tmp_path / "data" / "manifest.json").write_text(json.dumps({**content, "format": "coco-boxes/1"}))
    with pytest.raises(DataError, match="'coco-boxes/1' where 'coco-masks/1' is needed"):
        open_prepared(tmp_path / "data")


def test_records_of_other_pictures_are_found(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "data")
    ids = tmp_path / "data" / "val" / "picture_id.npy"
    np.save(ids, np.load(ids)[::-1].copy())
    pictures = open_prepared(tmp_path / "data").validation()
    with RecordReader(prepared / "val.rec") as records:
        first = records.image(0).record_id
    with pytest.raises(DataError, match=rf"holds picture {first}, its boxes are those of picture"):
        pictures.record(0)
    pictures.close()
