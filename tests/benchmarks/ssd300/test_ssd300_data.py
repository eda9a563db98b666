"""COCO's raw layout, what is prepared from it, and what the reader makes of that."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_ssd300 import SMALL, SYNTHETIC, reader

from benchmarks.ssd300.augment import draw, train_pixels
from benchmarks.ssd300.config import Facts
from benchmarks.ssd300.data import Ssd300Data
from benchmarks.ssd300.model import SSD300
from benchmarks.ssd300.prepare import COMMANDS, prepare
from benchmarks.ssd300.synthetic import generate
from common.data.batches import Block
from common.data.order import EpochStream, sample_generator
from common.detection.coco_raw import SPLITS
from common.detection.coco_synthetic import category_ids as drawn_ids
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError
from common.formats.recordio import RecordReader
from common.nn.backbone_file import load_backbone
from tests.common.detection.raw_coco import annotations, changed


def settings(facts: Facts = SMALL, **changes: int) -> Ssd300Data:
    return Ssd300Data(facts, reader(**changes), torch.float32, crop_attempts=1)


SETTINGS = settings()
BLOCK = Block(0, 1, 2, 0, 2 * SYNTHETIC.train)


def batches(root: Path, data: Ssd300Data = SETTINGS):
    source = data.open_train(root, Layout(seed=5), 4)
    try:
        return [batch.tensors for batch in source.batches(BLOCK)]
    finally:
        source.close()


def test_generated_data_are_cocos_with_gaps_between_ids_crowds_and_pictures_without_boxes(drawn):
    coco = annotations(drawn, "train")
    assert len(coco.imgs) == SYNTHETIC.train + 1
    assert [picture for picture in coco.imgs if not coco.getAnnIds(picture)] == [max(coco.imgs)]
    assert sorted(coco.cats) == drawn_ids(3) == [1, 3, 4]
    steps = np.diff(sorted(coco.imgs))
    assert set(steps.tolist()) == {7}
    for split in SPLITS:
        for picture in annotations(drawn, split).imgs.values():
            with Image.open(drawn / SPLITS[split] / picture["file_name"]) as opened:
                assert opened.size == (picture["width"], picture["height"])


def test_the_generated_backbone_is_one_and_its_norms_fit_the_pictures(drawn):
    network = SSD300(SMALL, torch.Generator().manual_seed(0))
    load_backbone(drawn / "backbone.pth", network.backbone)
    state = torch.load(drawn / "backbone.pth", weights_only=True)
    assert {"fc.weight", "layer3.0.downsample.1.running_var", "bn1.num_batches_tracked"} <= state.keys()
    sides = [
        np.asarray(Image.open(path).convert("RGB").resize((64, 64), Image.Resampling.BILINEAR))
        for path in sorted((drawn / "train2017").iterdir())
    ]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (SMALL.mean, SMALL.std))
    image = torch.stack([(torch.tensor(pixels).permute(2, 0, 1) - mean) / std for pixels in sides])
    first = torch.nn.functional.conv2d(image, state["conv1.weight"], stride=2, padding=3)
    torch.testing.assert_close(state["bn1.running_mean"], first.mean((0, 2, 3)), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(state["bn1.running_var"], first.var((0, 2, 3)), rtol=1e-3, atol=1e-4)


def test_what_is_prepared_are_the_pictures_with_a_box_byte_for_byte_and_all_boxes(drawn, prepared):
    for split, name in SPLITS.items():
        coco = annotations(drawn, split)
        wanted = sorted(coco.imgs if split == "val" else {box["image_id"] for box in coco.anns.values()})
        with RecordReader(prepared / f"{split}.rec") as records:
            found = [records.image(index) for index in range(len(records))]
        assert [record.record_id for record in found] == wanted
        for record in found:
            assert record.data == (drawn / name / coco.imgs[record.record_id]["file_name"]).read_bytes()
        columns = {path.stem: np.load(path) for path in (prepared / split).iterdir()}
        assert columns["picture_id"].tolist() == wanted
        boxes = list(
            zip(*(columns[f"box_{column}"].tolist() for column in ("picture", "class", "xywh", "crowd")), strict=True)
        )
        expected = [
            (box["image_id"], box["category_id"], box["bbox"], bool(box["iscrowd"])) for box in coco.anns.values()
        ]
        assert sorted(boxes) == sorted(expected)
    assert COMMANDS.verify(prepared).synthetic


def test_archives_give_what_folders_give(drawn, prepared, tmp_path):
    packed = tmp_path / "raw"
    packed.mkdir()
    for name, members in (
        ("annotations_trainval2017.zip", sorted((drawn / "annotations").iterdir())),
        ("train2017.zip", sorted((drawn / "train2017").iterdir())),
        ("val2017.zip", sorted((drawn / "val2017").iterdir())),
    ):
        with zipfile.ZipFile(packed / name, "w") as archive:
            for path in members:
                archive.write(path, path.relative_to(drawn))
    shutil.copy(drawn / "SYNTHETIC", packed)
    made = prepare(packed, tmp_path / "data", workers=2)
    expected = json.loads((prepared / "manifest.json").read_text())
    assert {name: entry.sha256 for name, entry in made.files.items()} == {
        name: entry["sha256"] for name, entry in expected["files"].items()
    }
    assert not (tmp_path / "data-assets").exists()
    assert (prepared.with_name("data-assets") / "backbone.pth").samefile(drawn / "backbone.pth")


def test_a_training_batch_is_what_the_plan_of_each_picture_says(drawn, prepared):
    coco = annotations(drawn, "train")
    stream = EpochStream(SYNTHETIC.train, 4, seed=5)
    pictures = sorted({box["image_id"] for box in coco.anns.values()})
    class_of = {category: index + 1 for index, category in enumerate(coco.cats)}
    mean, std = np.array(SMALL.mean), np.array(SMALL.std)
    for position, batch in enumerate(batches(prepared)):
        assert batch["image"].shape == (4, 4, 64, 64)
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
        assert not batch["image"][:, 3].any()
        for slot, (epoch, sample) in enumerate(stream.samples(BLOCK, position)):
            info = coco.imgs[pictures[sample]]
            found = [coco.anns[number] for number in coco.getAnnIds(info["id"])]
            x, y, width, height = np.array([box["bbox"] for box in found], float).T
            shares = np.stack(
                [x / info["width"], y / info["height"], (x + width) / info["width"], (y + height) / info["height"]], 1
            )
            plan = draw(shares, SMALL, 1, sample_generator(5, epoch, sample))
            count = int(batch["count"][slot])
            assert count == plan.crop.kept.sum() >= 1
            np.testing.assert_allclose(batch["boxes"][slot, :count], plan.boxes, atol=1e-6)
            assert not batch["boxes"][slot, count:].any()
            labels = np.array([class_of[box["category_id"]] for box in found])[plan.crop.kept]
            assert batch["label"][slot].tolist() == [*labels.tolist(), *[0] * (12 - count)]
            with Image.open(drawn / "train2017" / info["file_name"]) as opened:
                pixels = train_pixels(opened.convert("RGB"), plan, 64)
            np.testing.assert_allclose(batch["image"][slot, :3].permute(1, 2, 0), (pixels - mean) / std, atol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_evaluation_sees_every_picture_once_resized_and_with_its_size(drawn, prepared, replicas):
    coco, seen = annotations(drawn, "val"), []
    for rank in range(replicas):
        source = SETTINGS.open_eval(prepared, Layout({"dp": replicas}, rank), batch=2)
        for host in source:
            batch = host.tensors
            for image, picture, size in zip(
                batch["image"], batch["picture"].tolist(), batch["size"].tolist(), strict=True
            ):
                if picture == -1:
                    continue
                info = coco.imgs[picture]
                seen.append(picture)
                assert size == [info["height"], info["width"]]
                with Image.open(drawn / "val2017" / info["file_name"]) as opened:
                    pixels = np.asarray(opened.convert("RGB").resize((64, 64), Image.Resampling.BILINEAR))
                expected = (pixels - np.array(SMALL.mean)) / np.array(SMALL.std)
                np.testing.assert_allclose(image[:3].permute(1, 2, 0), expected, atol=1e-5)
        source.close()
    assert sorted(seen) == sorted(coco.imgs)


# Bad data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["annotations"][0].update(category_id=2), "category_id"),
        (lambda c: c["annotations"][0].update(image_id=1), "image_id"),
        (lambda c: c["annotations"][0].update(bbox=[0, 0, -1, 4]), "bbox"),
        (lambda c: c["annotations"][0].update(bbox=[0, 0, float("nan"), 4]), "bbox"),
        (lambda c: c["images"].append(c["images"][0]), "'id'"),
        (lambda c: c["images"][0].update(file_name="absent.jpg"), "lacks 1 of 11 pictures, such as absent.jpg"),
        (lambda c: c["images"][0].update(width=1000), "where the annotations say"),
        (lambda c: c["categories"].pop(), "category_id"),
        (
            lambda c: c["categories"].append({"id": 99, "name": "new"}),
            "the categories of training and validation differ",
        ),
    ],
)
def test_bad_annotations_are_one_error(drawn, tmp_path, change, message):
    folder = changed(drawn, tmp_path / "raw", change)
    with pytest.raises(DataError, match=message):
        prepare(folder, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("kept", [0, 10, 0.7])
def test_a_truncated_picture_is_named(drawn, tmp_path, kept):
    shutil.copytree(drawn, tmp_path / "raw")
    path = sorted((tmp_path / "raw" / "train2017").iterdir())[2]
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(DataError, match=f"{path.name} cannot be decoded"):
        prepare(tmp_path / "raw", tmp_path / "data")


def test_more_boxes_than_the_capacity_of_a_batch_are_named(prepared):
    boxes = np.load(prepared / "train" / "box_picture.npy")
    ids, counts = np.unique(boxes, return_counts=True)
    small = settings(max_boxes=int(counts.max()) - 1)
    with pytest.raises(DataError, match=rf"has {counts.max()} boxes, .* use reader.max_boxes={counts.max()}"):
        batches(prepared, data=small)
    assert counts.max() in counts[ids == ids[counts.argmax()]]


def test_data_of_other_classes_are_refused(prepared):
    with pytest.raises(DataError, match="holds 3 classes where the model has 80"):
        batches(prepared, data=settings(dataclasses.replace(SMALL, classes=80)))


def test_other_data_than_coco_have_to_say_so(drawn, tmp_path):
    shutil.copytree(drawn, tmp_path / "raw")
    (tmp_path / "raw" / "SYNTHETIC").unlink()
    with pytest.raises(DataError, match="where COCO 2017 has"):
        prepare(tmp_path / "raw", tmp_path / "data")


def test_raw_data_that_are_missing_are_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        prepare(tmp_path / "raw", tmp_path / "data")
    (tmp_path / "raw").mkdir()
    with pytest.raises(
        DataError, match=r"instances_train2017.json is missing, and so is .*annotations_trainval2017.zip"
    ):
        prepare(tmp_path / "raw", tmp_path / "data")
    (tmp_path / "raw" / "annotations_trainval2017.zip").write_bytes(b"no archive")
    with pytest.raises(DataError, match="damaged or no archive"):
        prepare(tmp_path / "raw", tmp_path / "data")


def test_an_archive_whose_compressed_bytes_are_damaged_is_one_error(drawn, tmp_path):
    folder = tmp_path / "raw"
    shutil.copytree(drawn, folder)
    for name, members in (("annotations_trainval2017", "annotations"), ("train2017", "train2017")):
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted((folder / members).iterdir()):
                archive.write(path, path.relative_to(folder))
        shutil.rmtree(folder / members)
        data = bytearray((folder / f"{name}.zip").read_bytes())
        intact, data[100:140] = bytes(data), bytes([255] * 40)  # within the first member
        (folder / f"{name}.zip").write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}.zip: .* cannot be read: .*; .*download"):
            prepare(folder, tmp_path / "data")
        (folder / f"{name}.zip").write_bytes(intact)


def test_the_ids_of_categories_are_those_of_the_data(prepared):
    assert SETTINGS.category_ids(prepared) == [1, 3, 4]


def test_generating_wants_pictures_and_classes(tmp_path):
    for change in ({"train": 0}, {"classes": 0}, {"classes": 10_000}, {"sides": (300, 200)}):
        with pytest.raises(ConfigError):
            generate(tmp_path / "raw", dataclasses.replace(SYNTHETIC, **change))
