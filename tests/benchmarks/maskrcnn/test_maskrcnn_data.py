"""The reader that runs anywhere, and what becomes of its batches, against one picture after another by Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image
from small_coco import BLOCK, LONG, MICRO_BATCH, SHORT, SLOT, SYNTHETIC, settings

from benchmarks.maskrcnn.pictures import Preparer, resized_size
from benchmarks.maskrcnn.prepared import open_prepared
from common.distributed.layout import Layout
from common.errors import DataError

CPU = torch.device("cpu")
SEED = 5


def train(root, **reader):
    source = settings(**reader).open_train(root, Layout(seed=SEED), MICRO_BATCH)
    found = list(source.batches(BLOCK))
    source.close()
    return found


def evaluation(root, replicas, replica):
    source = settings().open_eval(root, Layout({"dp": replicas}, replica), 2)
    found = list(source)
    source.close()
    return found


def legacy_boxes(corners, size, published, mirrored):
    """Return corners in float64: scaled; if mirrored, x becomes W - x - 1 and the corners are swapped."""
    boxes = []
    for x1, y1, x2, y2 in corners.astype(np.float64).tolist():
        x1, x2 = (x * size[1] / published[1] for x in (x1, x2))
        y1, y2 = (y * size[0] / published[0] for y in (y1, y2))
        boxes.append([size[1] - x2 - 1, y1, size[1] - x1 - 1, y2] if mirrored else [x1, y1, x2, y2])
    return torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)


def test_slots_hold_the_pictures_and_what_is_in_them(prepared):
    """The index of the first object identifies a picture."""
    pictures, objects = open_prepared(prepared).train()
    index_of = {int(objects.bounds[index]): index for index in range(len(pictures)) if objects.counts[index]}
    preparer = Preparer(settings().facts, {"resize": "reference"}, CPU, torch.float32)
    seen, mirrors = set(), set()
    for batch in train(prepared):
        tensors = batch.tensors
        made = preparer(tensors, batch.key)
        assert made["image"].shape == (MICRO_BATCH, 3, *batch.key)
        assert made.keys() == tensors.keys() - {"pixels", "decoded_size"} | {"image"}
        for slot in range(MICRO_BATCH):
            if not tensors["real"][slot] or not tensors["count"][slot]:
                continue
            index, count = index_of[int(tensors["object"][slot])], int(tensors["count"][slot])
            width, height = pictures.size(index)
            size = resized_size(height, width, SHORT, LONG)
            mirrored = bool(tensors["transform"][slot, 2])
            assert tensors["size"][slot].tolist() == list(size)
            assert tensors["decoded_size"][slot].tolist() == [height, width]
            expected = torch.tensor([size[1] / width, size[0] / height, float(mirrored), float(width)])
            assert torch.equal(tensors["transform"][slot], expected)
            mine = slice(objects.bounds[index], objects.bounds[index + 1])
            boxes = legacy_boxes(objects.corners[mine], size, (height, width), mirrored)
            torch.testing.assert_close(tensors["boxes"][slot, :count].double(), boxes, rtol=1e-6, atol=1e-4)
            assert tensors["label"][slot, :count].tolist() == objects.label[mine].tolist()
            assert not tensors["boxes"][slot, count:].any()
            assert not tensors["label"][slot, count:].any()
            picture = pictures.picture(index, pictures.record(index))
            assert torch.equal(tensors["pixels"][slot, :height, :width], torch.from_numpy(np.array(picture)))
            levels = np.array(picture.resize(size[::-1], Image.Resampling.BILINEAR))[:, :, ::-1].astype(np.float32)
            levels = levels[:, ::-1] if mirrored else levels
            expected = torch.from_numpy(levels - np.array(settings().facts.mean, np.float32)).permute(2, 0, 1)
            assert torch.equal(made["image"][slot, :, : size[0], : size[1]], expected)
            seen.add(index)
            mirrors.add(mirrored)
    pictures.close()
    assert seen == set(index_of.values())
    assert mirrors == {False, True}


def test_a_pass_has_every_picture_once_and_masks_what_is_left_of_its_batches(prepared):
    pictures, objects = open_prepared(prepared).train()
    pictures.close()
    high = int(np.sum(objects.size[:, 0] >= objects.size[:, 1]))
    length = -(-high // MICRO_BATCH) + -(-(SYNTHETIC.train - high) // MICRO_BATCH)
    whole = train(prepared)
    assert len({int(batch.tensors["seed"]) for batch in whole}) == len(whole)
    first = whole[:length]
    assert sum(int(batch.tensors["real"].sum()) for batch in first) == SYNTHETIC.train
    assert length * MICRO_BATCH > SYNTHETIC.train, "an incomplete batch is what this is about"
    seen = [int(o) for b in first for o in b.tensors["object"][b.tensors["real"] & (b.tensors["count"] > 0)]]
    assert len(set(seen)) == len(seen) == int(np.sum(objects.counts > 0))
    for batch in first:
        tensors = batch.tensors
        (surplus,) = (~tensors["real"]).nonzero(as_tuple=True)
        assert not tensors["count"][surplus].any()
        assert not tensors["boxes"][surplus].any()
        assert all(torch.equal(tensors["pixels"][slot], tensors["pixels"][0]) for slot in surplus)
        assert all(torch.equal(tensors["size"][slot], tensors["size"][0]) for slot in surplus)


def test_batches_fit_their_shapes_and_have_one_orientation(prepared):
    found = train(prepared)
    assert {batch.key for batch in found} == {(192, 320), (320, 192)}
    for batch in found:
        assert (batch.tensors["size"] <= torch.tensor(batch.key)).all()
        high = batch.tensors["decoded_size"][:, 0] >= batch.tensors["decoded_size"][:, 1]
        assert high.all() or not high.any()


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_evaluation_has_every_picture_once_at_its_shape(prepared, replicas):
    pictures = open_prepared(prepared).validation()
    index_of = {int(number): index for index, number in enumerate(pictures.annotations.picture_id)}
    preparer, seen = Preparer(settings().facts, {"resize": "reference"}, CPU, torch.float32), []
    parts = [evaluation(prepared, replicas, replica) for replica in range(replicas)]
    assert len({len(part) for part in parts}) == 1
    for batch in [batch for part in parts for batch in part]:
        made = preparer.evaluation(batch.tensors, batch.key)
        assert made.keys() == {"image", "picture", "size", "original"}
        for slot, number in enumerate(batch.tensors["picture"].tolist()):
            if number < 0:
                assert batch.tensors["decoded_size"][slot].tolist() == made["size"][slot].tolist() == [1, 1]
                continue
            seen.append(number)
            width, height = pictures.size(index_of[number])
            assert made["original"][slot].tolist() == [height, width]
            size = resized_size(height, width, SHORT, LONG)
            assert made["size"][slot].tolist() == list(size)
            index = index_of[number]
            levels = pictures.picture(index, pictures.record(index)).resize(size[::-1], Image.Resampling.BILINEAR)
            expected = np.array(levels)[:, :, ::-1].astype(np.float32) - np.array(settings().facts.mean, np.float32)
            assert torch.equal(
                made["image"][slot, :, : size[0], : size[1]].permute(1, 2, 0), torch.from_numpy(expected)
            )
            assert not made["image"][slot, :, size[0] :].any()
            assert not made["image"][slot, :, :, size[1] :].any()
    pictures.close()
    assert sorted(seen) == sorted(index_of)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_boxes": 1}, r"picture \d+ has (\d+) .* at most 1: use reader\.max_boxes=\1"),
        ({"shapes": [[192, 320]]}, r"picture \d+ is resized to a height of \d+ px .* none of reader\.shapes="),
    ],
)
def test_data_that_do_not_fit_the_settings_are_refused(prepared, changes, message):
    with pytest.raises(DataError, match=message):
        train(prepared, **changes)


def test_pictures_larger_than_a_slot_are_refused(prepared):
    small = settings({"longest_side": 64})
    with pytest.raises(DataError, match=r"picture \d+ has a side of \d+ px, .* slot holds at most .*longest_side=64"):
        small.open_eval(prepared, Layout(), 2)


def test_data_of_other_classes_are_refused(prepared):
    other = settings({"classes": 3})
    with pytest.raises(DataError, match="holds 12 classes where the model has 3"):
        other.open_train(prepared, Layout(), MICRO_BATCH)


def test_slots_have_the_capacity_for_every_picture(prepared):
    assert all(batch.tensors["pixels"].shape[1:] == (SLOT, SLOT, 3) for batch in evaluation(prepared, 1, 0))
