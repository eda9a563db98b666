"""Detections against the benchmark's rule, picture by picture and class by class with torchvision's suppression."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torchvision
from small_ssd300 import SMALL

from benchmarks.ssd300.detect import Detector
from benchmarks.ssd300.model import SSD300, Predictions
from benchmarks.ssd300.targets import coding, reference_boxes, reference_rows

CPU = torch.device("cpu")


def detector(**changes: object) -> Detector:
    facts = dataclasses.replace(SMALL, **changes)
    return Detector(SSD300(SMALL, torch.Generator().manual_seed(0)), facts, {}, CPU)


def plain(outputs: Predictions, size, classes=3, candidates=200, keep=200, threshold=0.05):
    """Return the sorted rows of score, class and box of each picture."""
    anchors = reference_boxes(SMALL)[reference_rows(SMALL)]
    pictures = []
    for logits, offsets, (height, width) in zip(outputs.logits, outputs.offsets, size.tolist(), strict=True):
        boxes, rows = coding(SMALL).decode(offsets, anchors), []
        probabilities = logits.float().softmax(1)
        for label in range(1, classes + 1):
            score = probabilities[:, label]
            order = score.argsort(descending=True)[:candidates]
            order = order[score[order] > threshold]
            kept = order[torchvision.ops.nms(boxes[order], score[order], 0.5)]
            for row in kept.tolist():
                x1, y1, x2, y2 = boxes[row].tolist()
                rows.append((score[row].item(), label, x1 * width, y1 * height, (x2 - x1) * width, (y2 - y1) * height))
        pictures.append(sorted(rows, reverse=True)[:keep])
    return pictures


def synthetic(seed: int) -> Predictions:
    random = torch.Generator().manual_seed(seed)
    boxes = len(reference_rows(SMALL))
    return Predictions(
        torch.randn((3, boxes, 4), generator=random) * 3, torch.randn((3, boxes, 4), generator=random) * 0.5
    )


@pytest.mark.parametrize(("candidates", "keep"), [(200, 200), (20, 200), (200, 11)])
def test_detections_are_those_of_the_rule(candidates, keep):
    outputs, size = synthetic(candidates + keep), torch.tensor([[480.0, 640.0], [300.0, 200.0], [64.0, 64.0]])
    outputs.logits[2] = torch.tensor([20.0, 0.0, 0.0, 0.0])  # no detection
    found = detector(candidates=candidates, detections=keep).select(outputs, size)
    expected = plain(outputs, size, candidates=candidates, keep=keep)
    assert not found.valid[2].any()
    for picture in range(3):
        valid = found.valid[picture]
        assert int(valid.sum()) == len(expected[picture])
        rows = torch.cat([found.score[picture, :, None], found.class_id[picture, :, None], found.box[picture]], 1)[
            valid
        ]
        torch.testing.assert_close(rows, torch.tensor(expected[picture]).view(-1, 6), rtol=1e-4, atol=1e-4)


def test_an_overlap_of_exactly_a_half_is_suppressed():
    """Kept is what overlaps a better one by less than the threshold."""
    found = detector(nms_threshold=0.5)
    assert found._most_overlap < 0.5
    boxes = torch.tensor([[[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.5]]])
    kept, valid = found._suppress(
        boxes, torch.tensor([[0.9, 0.8]]), torch.zeros((1, 2), dtype=torch.int64), found._most_overlap, 2
    )
    assert valid.tolist() == [[True, False]]
    assert kept[0, 0] == 0


def test_detections_carry_the_names_of_the_data():
    outputs, size = synthetic(5), torch.ones((3, 2))
    found = detector()
    before = found.select(outputs, size)
    found.name_classes([1, 3, 90])
    after = found.select(outputs, size)
    assert set(before.class_id.unique().tolist()) == {1, 2, 3}
    assert torch.equal(torch.tensor([0, 1, 3, 90])[before.class_id], after.class_id)


def test_boxes_are_neither_cut_to_the_picture_nor_one_pixel_larger():
    boxes = len(reference_rows(SMALL))
    logits = torch.zeros((1, boxes, 4))
    logits[0, 0, 1] = 9.0
    found = detector().select(Predictions(logits, torch.zeros((1, boxes, 4))), torch.tensor([[64.0, 128.0]]))
    best = reference_boxes(SMALL)[0]  # around (4, 4) px, 12 px large
    expected = [best[0] * 128, best[1] * 64, (best[2] - best[0]) * 128, (best[3] - best[1]) * 64]
    assert found.box[0, 0].tolist() == pytest.approx([float(value) for value in expected])
    assert found.box[0, 0, 0] < 0
