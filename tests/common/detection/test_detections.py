"""Detections from fixed shapes to columns, and a scorer's figures of them."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from common.contract.evaluation import Predictions
from common.detection import coco_scorer
from common.detection.annotations import Annotations
from common.detection.coco_scorer import CocoScorer
from common.detection.detections import PADDING, DetectionBuffer, Found, in_picture
from common.distributed.layout import Layout

KEEP = 4


@pytest.fixture
def buffer():
    return DetectionBuffer(Layout(), KEEP)


def found_of(valid, seed=0):
    """Random detections, whose ``valid`` slots have a detection."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(valid), len(valid[0]))
    return Found(
        torch.rand((*shape, 4), generator=generator) * 50,
        torch.rand(shape, generator=generator),
        torch.randint(90, shape, generator=generator),
        torch.tensor(valid, dtype=torch.bool),
    )


def test_columns_hold_what_is_there_in_the_order_of_the_pictures(buffer):
    first, second = found_of([[1, 0, 1, 1], [0, 0, 0, 0]]), found_of([[1, 1, 0, 0], [1, 1, 1, 1]], seed=1)
    buffer.begin(4)
    buffer.add(torch.tensor([139, 285]), first)
    buffer.add(torch.tensor([632, PADDING]), second)
    columns = buffer.columns()
    assert columns["pictures"].tolist() == [139, 285, 632]
    assert columns["picture_id"].tolist() == [139] * 3 + [632] * 2
    kept = [(first, 0, [0, 2, 3]), (second, 0, [0, 1])]
    for name, field in (("box", "box"), ("score", "score"), ("class_id", "class_id")):
        expected = np.concatenate([getattr(found, field)[picture][slots].numpy() for found, picture, slots in kept])
        np.testing.assert_array_equal(columns[name], expected)


def test_a_box_whose_decoding_overflowed_is_a_finite_one_that_finds_nothing():
    inf, nan = float("inf"), float("nan")
    corners = torch.tensor([[[-inf, -inf, inf, inf], [nan, 0.0, nan, 1.0], [0.1, 0.2, 0.3, 0.5]]])
    box = in_picture(corners, 1.0, 1.0, torch.tensor([[100.0, 200.0]]))
    assert box.isfinite().all()
    torch.testing.assert_close(box[0, 2], torch.tensor([20.0, 20.0, 40.0, 30.0]))
    truth = Annotations(
        *(np.array([value], np.int64) for value in (7, 100, 200, 3, 7, 3)),
        np.array([[0.0, 0.0, 200.0, 100.0]]),
        np.array([20_000.0]),
        np.zeros(1, np.bool_),
    )
    scorer = CocoScorer(lambda root: truth, torch.device("cpu"))
    scorer.open_data(Path())
    columns = {
        "pictures": np.array([7]),
        "picture_id": np.array([7, 7, 7]),
        "class_id": np.array([3, 3, 3]),
        "box": box[0].numpy(),
        "score": np.array([0.9, 0.8, 0.7], np.float32),
    }
    assert scorer.score(Predictions(columns))["mean_average_precision"] == 0


def test_a_picture_with_fewer_slots_than_are_kept_leaves_none_of_an_earlier_evaluation(buffer):
    buffer.begin(1)
    buffer.add(torch.tensor([7]), found_of([[1, 1, 1, 1]]))
    assert len(buffer.columns()["score"]) == 4
    buffer.begin(1)
    buffer.add(torch.tensor([7]), found_of([[1, 1]]))
    assert len(buffer.columns()["score"]) == 2


def test_ids_beyond_24_bits_stay_exact(buffer):
    buffer.begin(1)
    buffer.add(torch.tensor([2**24 + 1]), found_of([[1]]))
    assert buffer.columns()["picture_id"].tolist() == [2**24 + 1]


def test_boxes_go_back_to_the_size_of_the_picture():
    corners = torch.tensor([[[40.0, 20.0, 80.0, 100.0]], [[0.0, 0.0, 200.0, 100.0]]])
    sizes = torch.tensor([[300.0, 100.0], [50.0, 640.0]])
    expected = [[[20.0, 60.0, 20.0, 240.0]], [[0.0, 0.0, 640.0, 50.0]]]
    torch.testing.assert_close(in_picture(corners, 100.0, 200.0, sizes), torch.tensor(expected))


def two_pictures(root: Path) -> Annotations:
    """Ground truth of two pictures with a box each, of classes 3 and 5."""
    return Annotations(
        picture_id=np.array([139, 285]),
        picture_height=np.array([100, 100]),
        picture_width=np.array([100, 100]),
        class_id=np.array([3, 5]),
        box_picture=np.array([139, 285]),
        box_class=np.array([3, 5]),
        box_xywh=np.array([[10.0, 10.0, 20.0, 20.0], [30.0, 30.0, 40.0, 40.0]]),
        box_area=np.array([400.0, 1600.0]),
        box_crowd=np.zeros(2, np.bool_),
    )


def predictions(**changes):
    columns = {
        "pictures": np.array([285, 139]),
        "picture_id": np.array([139, 285]),
        "class_id": np.array([3, 3]),
        "box": np.array([[10, 10, 20, 20], [30, 30, 40, 40]], np.float32),
        "score": np.array([0.9, 0.8], np.float32),
    }
    return Predictions({**columns, **changes})


def test_a_scorer_that_travelled_to_another_process_gives_the_mean_over_the_classes():
    scorer = pickle.loads(pickle.dumps(CocoScorer(two_pictures, torch.device("cpu"))))
    scorer.open_data(Path())
    figures = scorer.score(predictions())
    assert figures["mean_average_precision"] == pytest.approx(0.5)  # class 3 is found, class 5 is not
    assert figures["eval_samples"] == 2


def test_a_warm_up_scores_on_the_scorers_device_and_leaves_no_trace(monkeypatch):
    scorer, seen = CocoScorer(two_pictures, torch.device("cpu")), []
    original = coco_scorer.score
    monkeypatch.setattr(coco_scorer, "score", lambda *parts: seen.append(original(*parts)))
    scorer.warm_up()
    assert 0 < seen[0]["AP"] < 1, "what is right and what is wrong take different ways"
    monkeypatch.undo()
    scorer.open_data(Path())
    assert scorer.score(predictions())["mean_average_precision"] == pytest.approx(0.5)


@pytest.mark.parametrize("seen", [[139], [139, 285, 285], [139, 139]], ids=["one missed", "one too many", "one twice"])
def test_a_set_that_was_not_seen_wholly_has_no_score(seen):
    scorer = CocoScorer(two_pictures, torch.device("cpu"))
    scorer.open_data(Path())
    with pytest.raises(RuntimeError, match="were evaluated"):
        scorer.score(predictions(pictures=np.array(seen)))
