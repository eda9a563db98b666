"""COCO's figures against pycocotools."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.detection import coco_matching, coco_scoring
from common.detection.annotations import read_coco
from common.detection.coco_scoring import Detections, GroundTruth, score
from tests.common.detection.pycocotools_metrics import NAMES, ground_truth, metrics


def synthetic(seed, pictures=6, classes=3, boxes=40, found=150, decimals=1, crowds=0.1, side=200.0):
    """Random boxes, most detections near one; few decimals make equal scores."""
    chance = np.random.default_rng(seed)
    picture_ids = np.sort(chance.choice(10_000, pictures, replace=False))
    class_ids = np.sort(chance.choice(90, classes, replace=False))
    corner = chance.uniform(0, side, (boxes, 2))
    truth_box = np.concatenate([corner, np.exp(chance.uniform(0.5, 5.3, (boxes, 2)))], 1).round(1)
    at = chance.integers(boxes, size=found) if boxes else np.zeros(0, np.int64)
    near = truth_box[at] + chance.normal(0, 0.08, (len(at), 4)) * truth_box[at][:, [2, 3, 2, 3]]
    near[:, 2:] = np.abs(near[:, 2:])
    truth_picture = picture_ids[chance.integers(max(1, pictures - 1), size=boxes)]  # the last picture has no box
    truth_class = class_ids[chance.integers(max(1, classes - 1), size=boxes)]  # nor the last class
    elsewhere = chance.random(len(at)) < 0.2
    truth = GroundTruth(
        torch.from_numpy(picture_ids),
        torch.from_numpy(class_ids),
        torch.from_numpy(truth_picture),
        torch.from_numpy(truth_class),
        torch.from_numpy(truth_box),
        torch.from_numpy(truth_box[:, 2] * truth_box[:, 3] * chance.uniform(0.5, 1, boxes)),
        torch.from_numpy(chance.random(boxes) < crowds),
    )
    detections = Detections(
        torch.from_numpy(np.where(elsewhere, chance.choice(picture_ids, len(at)), truth_picture[at])),
        torch.from_numpy(np.where(elsewhere, chance.choice(class_ids, len(at)), truth_class[at])),
        torch.from_numpy(near),
        torch.from_numpy(chance.random(len(at)).round(decimals)),
    )
    return truth, detections


def dataset(truth):
    """Ground truth in COCO's format."""
    columns = (truth.picture_id, truth.class_id, truth.box, truth.area, truth.crowd)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {
        "images": [{"id": number} for number in truth.pictures.tolist()],
        "categories": [{"id": number} for number in truth.classes.tolist()],
        "annotations": [
            {"id": n, "image_id": picture, "category_id": number, "bbox": box, "area": area, "iscrowd": int(crowd)}
            for n, (picture, number, box, area, crowd) in enumerate(rows, 1)
        ],
    }


def oracle(truth, found):
    """Return pycocotools' metrics."""
    rows = [
        {"image_id": p, "category_id": c, "bbox": box, "score": value}
        for p, c, box, value in zip(
            found.picture_id.tolist(),
            found.class_id.tolist(),
            found.box.tolist(),
            found.score.tolist(),
            strict=True,
        )
    ]
    return metrics(ground_truth(dataset(truth)), rows)


def assert_as_pycocotools(truth, found):
    expected, figures = oracle(truth, found), score(truth, found)
    assert list(figures) == list(NAMES)
    assert figures == pytest.approx(expected, rel=0, abs=1e-12)
    return expected


@pytest.mark.parametrize("seed", range(8))
def test_random_pictures(seed):
    expected = assert_as_pycocotools(*synthetic(seed, decimals=(1, 2, 8)[seed % 3]))
    assert 0 < expected["AP"] < expected["AP50"] < 1


def test_more_than_100_detections_of_a_picture_and_class(monkeypatch):
    truth, found = synthetic(20, pictures=2, classes=2, boxes=12, found=500)
    expected = assert_as_pycocotools(truth, found)
    monkeypatch.setattr(coco_scoring, "LIMITS", (1, 10, 1000))
    assert score(truth, found)["AP"] != pytest.approx(expected["AP"], abs=1e-6)


def test_crowded_pictures_where_boxes_overlap_each_other():
    assert_as_pycocotools(*synthetic(30, pictures=2, classes=2, boxes=60, found=300, side=5.0, crowds=0.3))


def placed(truth_boxes, found_boxes):
    """Ground truth of one picture and class, and detections of falling score."""

    def columns(boxes):
        return [torch.zeros(len(boxes), dtype=torch.int64)] * 2 + [
            torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)
        ]

    one = torch.zeros(1, dtype=torch.int64)
    picture, number, boxes = columns(truth_boxes)
    area, crowd = boxes[:, 2] * boxes[:, 3], torch.zeros(len(boxes), dtype=torch.bool)
    scores = torch.linspace(0.9, 0.1, len(found_boxes), dtype=torch.float64)
    return GroundTruth(one, one, picture, number, boxes, area, crowd), Detections(*columns(found_boxes), scores)


@pytest.mark.parametrize(("lefts", "found"), [((0, 4), 2), ((4, 0), 1)])
def test_of_equal_overlaps_the_last_box_is_taken(lefts, found):
    """The first detection lies between both boxes, the second on the left one, which it finds if the other is taken."""
    truth, detections = placed([[left, 0, 10, 10] for left in lefts], [[2, 0, 10, 10], [0, 0, 10, 10]])
    expected = assert_as_pycocotools(truth, detections)
    assert expected["AP50"] == pytest.approx({1: 51, 2: 101}[found] / 101)


def test_the_box_of_most_overlap_is_taken():
    truth, found = placed([[0, 0, 10, 10], [3, 0, 10, 10]], [[1, 0, 10, 10], [5, 0, 10, 10]])
    assert assert_as_pycocotools(truth, found)["AP50"] == pytest.approx(1)
    wide, _ = placed([[3, 0, 10, 10], [0, 0, 10, 10]], [])
    assert assert_as_pycocotools(wide, found)["AP50"] == pytest.approx(1)


def test_an_overlap_of_exactly_a_threshold_is_enough():
    truth, found = placed([[0, 0, 10, 10]], [[0, 0, 5, 10]])
    assert assert_as_pycocotools(truth, found)["AP50"] == pytest.approx(1)


def test_boxes_that_come_twice_once_as_a_crowd_and_once_out_of_range():
    truth, found = synthetic(40, boxes=20, found=80)
    twice = torch.arange(20).repeat(3)
    columns = ("picture_id", "class_id", "box", "area", "crowd")
    truth = replace(truth, **{name: getattr(truth, name)[twice] for name in columns})
    crowd = truth.crowd.clone()
    crowd[20:30] = True
    area = truth.area * torch.linspace(0.2, 1, 60, dtype=torch.float64)
    assert_as_pycocotools(replace(truth, crowd=crowd, area=area), found)


def test_areas_on_the_bounds_belong_to_both_ranges():
    truth, found = synthetic(41, boxes=12, found=40, crowds=0.0)
    side = torch.tensor([32.0, 96.0], dtype=torch.float64)[torch.arange(12) % 2]
    boxes = torch.cat([truth.box[:, :2], side.repeat(2, 1).T], 1)
    exact = Detections(truth.picture_id, truth.class_id, boxes, found.score[:12])
    assert_as_pycocotools(replace(truth, box=boxes, area=side.square()), exact)


def test_only_crowds_leave_nothing_to_average():
    truth, found = synthetic(42, crowds=1.1)
    assert set(assert_as_pycocotools(truth, found).values()) == {-1.0}


def test_a_range_of_areas_without_ground_truth_is_minus_1():
    truth, found = synthetic(43)
    expected = assert_as_pycocotools(replace(truth, area=torch.full_like(truth.area, 50.0)), found)
    assert expected["AP_large"] == expected["AR_medium"] == -1
    assert expected["AP_small"] > 0


def test_nothing_found_is_0():
    truth, found = synthetic(45)
    nothing = Detections(found.picture_id[:0], found.class_id[:0], found.box[:0], found.score[:0])
    figures = score(truth, nothing)  # pycocotools refuses an empty list
    assert set(figures.values()) == {0.0}


def test_boxes_without_area():
    truth, found = synthetic(47)
    flat = found.box.clone()
    flat[::3, 2] = 0
    none = truth.box.clone()
    none[::4, 3] = 0
    assert_as_pycocotools(replace(truth, box=none), replace(found, box=flat))


def test_classes_and_pairs_in_small_portions_change_nothing(monkeypatch):
    truth, found = synthetic(48, classes=6)
    whole = score(truth, found)
    monkeypatch.setattr(coco_scoring, "DETECTIONS_AT_ONCE", 30)
    monkeypatch.setattr(coco_matching, "PAIRS_AT_ONCE", 7)
    assert score(truth, found) == whole
    assert whole == pytest.approx(oracle(truth, found), rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("picture_id", 10_001, "a box is of picture 10001, which is not known"),
        ("class_id", 91, "a box is of class 91, which is not known"),
        ("score", float("nan"), "a score is not finite"),
        ("box", float("inf"), "a box found is not finite"),
    ],
)
def test_what_cannot_be_scored_is_refused(name, value, message):
    truth, found = synthetic(49)
    column = getattr(found, name).clone()
    column[3] = value
    with pytest.raises(ValueError, match=f"^{message}$"):
        score(truth, replace(found, **{name: column}))


def test_single_precision_is_refused():
    truth, found = synthetic(50)
    with pytest.raises(ValueError, match=r"^a box found is of torch.float32, not of float64$"):
        score(truth, replace(found, box=found.box.float()))


def test_ground_truth_comes_from_annotations_in_any_order(tmp_path):
    truth, found = synthetic(51)
    content = dataset(truth)
    for entries in content.values():
        entries.reverse()
    content["images"] = [{**entry, "height": 9, "width": 9} for entry in content["images"]]
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    read = GroundTruth.of(read_coco(tmp_path / "boxes.json"), torch.device("cpu"))
    assert score(read, found) == pytest.approx(oracle(truth, found), rel=0, abs=1e-12)


def test_portions_are_as_large_as_they_may_be():
    bounds = np.array([0, 4, 6, 6, 17, 20, 21])
    assert list(coco_matching.portions(bounds, 6)) == [(0, 3), (3, 4), (4, 6)]
