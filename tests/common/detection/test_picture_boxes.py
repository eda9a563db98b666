"""Boxes by picture against a loop over the annotations in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.detection.annotations import Annotations
from common.detection.picture_boxes import EvaluationColumns, PictureBoxes, empty_boxes, put_boxes, require_capacity
from common.errors import DataError


def annotations(boxes, sizes=((40, 60), (30, 20), (50, 50)), ids=(7, 3, 90)):
    """Return annotations of pictures of ``sizes`` (height, width) with boxes (picture, class, x, y, width, height)."""
    box = np.array(boxes, np.float64).reshape(-1, 6)
    size = np.array(sizes, np.int64)
    return Annotations(
        picture_id=np.array(ids, np.int64),
        picture_height=size[:, 0],
        picture_width=size[:, 1],
        class_id=np.arange(5),
        box_picture=box[:, 0].astype(np.int64),
        box_class=box[:, 1].astype(np.int64),
        box_xywh=box[:, 2:],
        box_area=box[:, 4] * box[:, 5],
        box_crowd=np.zeros(len(box), bool),
    )


def expected(given, index, height, width, mirrored):
    """Corners and classes, by the definition: clamp, drop what is empty, mirror, resize."""
    picture_height, picture_width = int(given.picture_height[index]), int(given.picture_width[index])
    corners, classes = [], []
    for picture, class_id, (x, y, w, h) in zip(given.box_picture, given.box_class, given.box_xywh, strict=True):
        if picture != given.picture_id[index]:
            continue
        x1, x2 = (min(max(value, 0), picture_width) for value in (x, x + w))
        y1, y2 = (min(max(value, 0), picture_height) for value in (y, y + h))
        if x2 <= x1 or y2 <= y1:
            continue
        if mirrored:
            x1, x2 = picture_width - x2, picture_width - x1
        scale_x, scale_y = width / picture_width, height / picture_height
        corners.append([x1 * scale_x, y1 * scale_y, x2 * scale_x, y2 * scale_y])
        classes.append(class_id)
    return np.array(corners).reshape(-1, 4), classes


@pytest.mark.parametrize("mirrored", [False, True])
def test_boxes_are_clamped_mirrored_and_resized(mirrored):
    random = np.random.default_rng(0)
    boxes = [
        (int(random.choice([7, 3])), int(random.integers(5)), *random.uniform(-30, 60, 2), *random.uniform(0, 50, 2))
        for _ in range(200)
    ]
    given = annotations(boxes)
    found = PictureBoxes.of(given)
    for index in range(3):
        corners, classes = found.resized(index, 16, 24, mirrored)
        wanted, wanted_classes = expected(given, index, 16, 24, mirrored)
        assert corners.dtype == np.float32
        np.testing.assert_allclose(corners, wanted, atol=2e-5)
        assert classes.tolist() == wanted_classes
    assert 0 < found.counts[0] < 200
    assert found.counts[2] == 0


def test_what_is_empty_or_outside_falls_away_and_the_smallest_stays():
    boxes = [
        (7, 0, 1, 1, 0, 5),
        (7, 1, 60, 1, 9, 9),
        (7, 2, -5, 0, 5, 5),
        (7, 3, 59.95, 39.95, 10, 10),
        (7, 4, 5, 5, 0.05, 1),
    ]
    found = PictureBoxes.of(annotations(boxes))
    assert found.class_id.tolist() == [3, 4]
    np.testing.assert_allclose(found.corners[0], [59.95, 39.95, 60, 40], atol=1e-5)


def test_asking_twice_gives_the_same():
    found = PictureBoxes.of(annotations([(3, 1, 1, 2, 3, 4)]))
    first = found.resized(1, 10, 10, True)[0].copy()
    assert np.array_equal(found.resized(1, 10, 10, True)[0], first)


def test_a_set_without_boxes():
    found = PictureBoxes.of(annotations([]))
    assert found.counts.tolist() == [0, 0, 0]
    assert found.resized(0, 8, 8, True)[0].shape == (0, 4)


def test_a_picture_with_more_boxes_than_the_capacity_is_named():
    found = PictureBoxes.of(annotations([(3, 0, 1, 1, 2, 2)] * 4 + [(7, 0, 1, 1, 2, 2)] * 2))
    closed = []
    pictures = SimpleNamespace(describe="abc".__getitem__, close=lambda: closed.append(True))
    require_capacity(found.counts, 4, pictures)
    assert not closed
    with pytest.raises(DataError, match=r"^b has 4 boxes, and a batch holds at most 3: use reader\.max_boxes=4$"):
        require_capacity(found.counts, 3, pictures)
    assert closed


def test_boxes_of_a_batch_are_padded_with_zeros():
    found = PictureBoxes.of(annotations([(3, 4, 1, 2, 3, 4), (3, 2, 0, 0, 9, 9), (7, 1, 1, 1, 1, 1)]))
    tensors = empty_boxes(3, 4)
    for slot, index in enumerate((1, 2, 0)):
        put_boxes(tensors, slot, *found.resized(index, 30, 20, False))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "boxes": (torch.float32, (3, 4, 4)),
        "label": (torch.int64, (3, 4)),
        "count": (torch.int64, (3,)),
    }
    assert tensors["count"].tolist() == [2, 0, 1]
    assert tensors["label"].tolist() == [[4, 2, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert tensors["boxes"][0].tolist() == [[1, 2, 4, 6], [0, 0, 9, 9], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert not tensors["boxes"][1].any()


def test_an_evaluation_receives_ids_and_sizes():
    columns = EvaluationColumns(annotations([])).empty([(0, 2), (0, 0)], 4, False)
    assert columns["picture"].dtype == torch.int64
    assert columns["picture"].tolist() == [90, 7, -1, -1]
    assert columns["size"].dtype == torch.float32
    assert columns["size"].tolist() == [[50, 50], [40, 60], [0, 0], [0, 0]]
    assert EvaluationColumns(annotations([])).empty([], 2, False)["picture"].tolist() == [-1, -1]
