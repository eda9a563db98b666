"""Detections against the benchmark's rule, picture by picture and class by class in plain Python, and their masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.evaluate import REGION_STRIDES, Detector
from benchmarks.maskrcnn.model import MaskRCNN, RpnOutput
from benchmarks.maskrcnn.ops import roi_align
from benchmarks.maskrcnn.proposals import Proposals
from common.mlperf.fixed import fixed_facts

CLASSES = 3
FACTS = fixed_facts(
    Facts, "maskrcnn", classes=CLASSES, layers=[1, 1, 1, 1], width=8, pyramid_channels=8, box_channels=16,
    mask_convolutions=1, eval_proposals=40,
)  # fmt: skip
SIZES = torch.tensor([[120.0, 96.0], [64.0, 128.0], [100.0, 100.0]])
ALIGN = roi_align.ROI_ALIGN.reference

Row = tuple[float, int, list[float]]


def detector(facts: Facts = FACTS, model: MaskRCNN | None = None) -> Detector:
    model = model or MaskRCNN(facts, torch.Generator().manual_seed(0))
    return Detector(model, facts, ALIGN, {"suppression": "reference"}, torch.device("cpu"))


def overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of boxes whose corners are their first and last pixels."""

    def area(box: Sequence[float]) -> float:
        return (box[2] - box[0] + 1) * (box[3] - box[1] + 1)

    width = min(one[2], other[2]) - max(one[0], other[0]) + 1
    height = min(one[3], other[3]) - max(one[1], other[1]) + 1
    both = max(width, 0.0) * max(height, 0.0)
    return both / (area(one) + area(other) - both)


def decoded(box: Sequence[float], deltas: Sequence[float], size: Sequence[float]) -> list[float]:
    """The box that the offsets make of a proposal, within a picture of height and width."""
    width, height = box[2] - box[0] + 1, box[3] - box[1] + 1
    dx, dy, dw, dh = (delta / weight for delta, weight in zip(deltas, (10, 10, 5, 5), strict=True))
    x, y = box[0] + 0.5 * width + dx * width, box[1] + 0.5 * height + dy * height
    width, height = (side * math.exp(min(growth, math.log(1000 / 16))) for side, growth in ((width, dw), (height, dh)))
    corners = [x - width / 2, y - height / 2, x + width / 2 - 1, y + height / 2 - 1]
    return [min(max(value, 0.0), limit - 1) for value, limit in zip(corners, (size[1], size[0]) * 2, strict=True)]


def plain(logits: Tensor, deltas: Tensor, proposals: Proposals, keep: int, threshold: float = 0.05) -> list[list[Row]]:
    """Of each picture score, class and corners of the best, in order."""
    pictures, slots = proposals.score_BS.shape
    probability = logits.double().softmax(1).view(pictures, slots, -1).tolist()
    offsets = deltas.double().view(pictures, slots, -1, 4).tolist()
    found = []
    for picture in range(pictures):
        rows: list[Row] = []
        for label in range(1, CLASSES + 1):
            candidates = [
                (probability[picture][slot][label], slot)
                for slot in range(slots)
                if proposals.score_BS[picture, slot] > -math.inf and probability[picture][slot][label] > threshold
            ]
            kept: list[Row] = []
            for score, slot in sorted(candidates, key=lambda row: (-row[0], row[1])):
                box = proposals.boxes_BS4[picture, slot].tolist()
                corners = decoded(box, offsets[picture][slot][label], SIZES[picture].tolist())
                if all(overlap(corners, better) <= 0.5 for _, _, better in kept):
                    kept.append((score, label, corners))
            rows += kept
        found.append(sorted(rows, key=lambda row: -row[0])[:keep])
    return found


def made_up(seed: int, slots: int = 40) -> tuple[Tensor, Tensor, Proposals]:
    """What the box head says of random proposals, some of whose slots are empty."""
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random)

    first = uniform(3, slots, 2) * 60
    boxes = torch.cat([first, first + 2 + uniform(3, slots, 2) * 50], 2)
    score = torch.where(uniform(3, slots) < 0.8, uniform(3, slots), -torch.inf)
    logits = torch.randn((3 * slots, CLASSES + 1), generator=random) * 2
    deltas = torch.randn((3 * slots, 4 * (CLASSES + 1)), generator=random)
    deltas[::7] *= 20  # some boxes grow to the limit, and beyond the picture
    return logits, deltas, Proposals(boxes, score)


@pytest.mark.parametrize(("keep", "slots"), [(100, 40), (5, 40), (100, 7), (1, 1)])
def test_boxes_are_those_of_the_rule(keep: int, slots: int) -> None:
    logits, deltas, proposals = made_up(keep + slots, slots)
    proposals.score_BS[2] = -torch.inf  # nothing there
    found = detector(replace(FACTS, detections=keep)).select(logits, deltas, proposals, SIZES)
    expected = plain(logits, deltas, proposals, keep)
    assert found.score_BD.shape[1] == min(keep, CLASSES * slots)
    assert not (found.score_BD[2] > -torch.inf).any()
    for picture in range(3):
        there = found.score_BD[picture] > -torch.inf
        rows = torch.cat([found.score_BD[picture, :, None], found.corners_BD4[picture]], 1)[there]
        wanted = torch.tensor([[score, *corners] for score, _, corners in expected[picture]]).view(-1, 5)
        torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-3)
        assert found.label_BD[picture][there].tolist() == [label for _, label, _ in expected[picture]]


def test_of_equal_scores_lower_classes_come_first_and_then_earlier_proposals() -> None:
    boxes = torch.tensor([[[0.0, 0.0, 9.0, 9.0], [40.0, 0.0, 49.0, 9.0]]])
    logits = torch.tensor([[-9.0, 1.0, 1.0, -9.0]]).repeat(2, 1)
    facts = replace(FACTS, detections=3)
    found = detector(facts).select(logits, torch.zeros((2, 16)), Proposals(boxes, torch.zeros((1, 2))), SIZES[:1])
    assert found.label_BD.tolist() == [[1, 1, 2]]
    assert found.corners_BD4[0, :, 0].tolist() == [0.0, 40.0, 0.0]


def test_a_score_of_the_threshold_is_none() -> None:
    logits = torch.log(torch.tensor([[0.9, 0.05, 0.0501, 1e-9]]))
    proposals = Proposals(torch.tensor([[[0.0, 0.0, 9.0, 9.0]]]), torch.zeros((1, 1)))
    threshold = float(torch.softmax(logits, 1)[0, 1])
    found = detector(replace(FACTS, score_threshold=threshold)).select(
        logits, torch.zeros((1, 16)), proposals, SIZES[:1]
    )
    assert (found.score_BD > -torch.inf).sum() == 1
    assert found.label_BD[0, 0] == 2


class FixedProposals:
    """Proposals that do not depend on what the network says."""

    def __init__(self, proposals: Proposals) -> None:
        self.proposals = proposals

    def __call__(self, outputs: Sequence[RpnOutput], size_B2: Tensor) -> Proposals:
        assert len(outputs) == 5
        return self.proposals


def test_a_batch_is_what_its_pictures_are_alone() -> None:
    """Boxes in pixels of the published picture, with 1 more for the last pixel, and the masks of the same slots."""
    random = torch.Generator().manual_seed(2)
    model = MaskRCNN(FACTS, random)
    with torch.no_grad():
        model.box_head.cls_score.weight.normal_(0, 0.05, generator=random)
    image = torch.randn((3, 3, 128, 128), generator=random) * 50
    original = torch.tensor([[60.0, 48.0], [64.0, 128.0], [50.0, 25.0]])
    _, _, proposals = made_up(3)
    find = detector(model=model)
    find.name_classes([7, 8, 90])
    batch = {"image": image, "size": SIZES, "original": original}
    found = find(batch, FixedProposals(proposals))
    assert found.masks is not None
    assert int(found.there.sum()) > 20
    assert set(found.class_id[found.there].tolist()) <= {7, 8, 90}
    with torch.no_grad():
        for place in range(3):
            part = slice(place, place + 1)
            levels = model.pyramid(image[part])
            mine = Proposals(proposals.boxes_BS4[part], proposals.score_BS[part])
            features = ALIGN(levels[:4], mine.boxes_BS4, mine.score_BS > -torch.inf, REGION_STRIDES, 7, 2)
            boxes = find.select(*model.box_head(features), mine, SIZES[part])
            there = found.there[place]
            torch.testing.assert_close(found.score[place], boxes.score_BD[0], rtol=1e-4, atol=1e-5)
            scale = (original[place] / SIZES[place])[[1, 0, 1, 0]]
            corners = (boxes.corners_BD4[0] * scale)[there]
            torch.testing.assert_close(found.masks.corners[place][there], corners, rtol=1e-4, atol=1e-3)
            sides = corners[:, 2:] - corners[:, :2] + 1
            expected = torch.cat([corners[:, :2], sides], 1)
            torch.testing.assert_close(found.box[place][there], expected, rtol=1e-4, atol=1e-3)
            features = ALIGN(levels[:4], boxes.corners_BD4, there[None], REGION_STRIDES, 14, 2)
            own = torch.sigmoid(model.mask_head(features, boxes.label_BD[0]))
            torch.testing.assert_close(found.masks.probability[place][there], own[there], rtol=1e-4, atol=1e-4)
    assert torch.equal(found.masks.size, original)
