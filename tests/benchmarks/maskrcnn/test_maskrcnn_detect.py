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
from tests.benchmarks.maskrcnn.plain_detector import clip, decode, suppress

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


def plain(logits: Tensor, deltas: Tensor, proposals: Proposals, keep: int, threshold: float = 0.05) -> list[list[Row]]:
    """Return score, class and corners of each picture's best detections, in order."""
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
            candidates.sort(key=lambda row: (-row[0], row[1]))
            boxes = [
                clip(
                    decode(offsets[picture][slot][label], proposals.boxes_BS4[picture, slot].tolist(), (10, 10, 5, 5)),
                    *SIZES[picture].tolist(),
                )
                for _, slot in candidates
            ]
            rows += [(candidates[kept][0], label, boxes[kept]) for kept in suppress(boxes, 0.5)]
        found.append(sorted(rows, key=lambda row: -row[0])[:keep])
    return found


def synthetic(seed: int, slots: int = 40) -> tuple[Tensor, Tensor, Proposals]:
    """Return random outputs of the box head, and random proposals with some empty slots."""
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
def test_boxes_are_those_of_the_rule(keep, slots):
    logits, deltas, proposals = synthetic(keep + slots, slots)
    proposals.score_BS[2] = -torch.inf  # no detection
    found = detector(replace(FACTS, detections=keep)).select(logits, deltas, proposals, SIZES)
    expected = plain(logits, deltas, proposals, keep)
    assert found.score_BD.shape[1] == min(keep, CLASSES * slots)
    assert not (found.score_BD[2] > -torch.inf).any()
    for picture in range(3):
        valid = found.score_BD[picture] > -torch.inf
        rows = torch.cat([found.score_BD[picture, :, None], found.corners_BD4[picture]], 1)[valid]
        wanted = torch.tensor([[score, *corners] for score, _, corners in expected[picture]]).view(-1, 5)
        torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-3)
        assert found.label_BD[picture][valid].tolist() == [label for _, label, _ in expected[picture]]


def test_of_equal_scores_lower_classes_come_first_and_then_earlier_proposals():
    boxes = torch.tensor([[[0.0, 0.0, 9.0, 9.0], [40.0, 0.0, 49.0, 9.0]]])
    logits = torch.tensor([[-9.0, 1.0, 1.0, -9.0]]).repeat(2, 1)
    facts = replace(FACTS, detections=3)
    found = detector(facts).select(logits, torch.zeros((2, 16)), Proposals(boxes, torch.zeros((1, 2))), SIZES[:1])
    assert found.label_BD.tolist() == [[1, 1, 2]]
    assert found.corners_BD4[0, :, 0].tolist() == [0.0, 40.0, 0.0]


def test_a_score_of_the_threshold_is_none():
    logits = torch.log(torch.tensor([[0.9, 0.05, 0.0501, 1e-9]]))
    proposals = Proposals(torch.tensor([[[0.0, 0.0, 9.0, 9.0]]]), torch.zeros((1, 1)))
    threshold = float(torch.softmax(logits, 1)[0, 1])
    found = detector(replace(FACTS, score_threshold=threshold)).select(
        logits, torch.zeros((1, 16)), proposals, SIZES[:1]
    )
    assert (found.score_BD > -torch.inf).sum() == 1
    assert found.label_BD[0, 0] == 2


class FixedProposals:
    """Proposals that do not depend on the network's outputs."""

    def __init__(self, proposals: Proposals) -> None:
        self.proposals = proposals

    def __call__(self, outputs: Sequence[RpnOutput], size_B2: Tensor) -> Proposals:
        assert len(outputs) == 5
        return self.proposals


def test_a_batch_is_what_its_pictures_are_alone():
    """Boxes in pixels of the published picture, with 1 more for the last pixel, and the masks of the same slots."""
    random = torch.Generator().manual_seed(2)
    model = MaskRCNN(FACTS, random)
    with torch.no_grad():
        model.box_head.cls_score.weight.normal_(0, 0.05, generator=random)
    image = torch.randn((3, 3, 128, 128), generator=random) * 50
    original = torch.tensor([[60.0, 48.0], [64.0, 128.0], [50.0, 25.0]])
    _, _, proposals = synthetic(3)
    find = detector(model=model)
    find.name_classes([7, 8, 90])
    batch = {"image": image, "size": SIZES, "original": original}
    found = find(batch, FixedProposals(proposals))
    assert found.masks is not None
    assert int(found.valid.sum()) > 20
    assert set(found.class_id[found.valid].tolist()) <= {7, 8, 90}
    with torch.no_grad():
        for index in range(3):
            part = slice(index, index + 1)
            levels = model.pyramid(image[part])
            mine = Proposals(proposals.boxes_BS4[part], proposals.score_BS[part])
            regions = roi_align.Regions(mine.boxes_BS4, mine.score_BS > -torch.inf, 7)
            (features,) = ALIGN(levels[:4], [regions], REGION_STRIDES, 2)
            boxes = find.select(*model.box_head(features), mine, SIZES[part])
            valid = found.valid[index]
            torch.testing.assert_close(found.score[index], boxes.score_BD[0], rtol=1e-4, atol=1e-5)
            scale = (original[index] / SIZES[index])[[1, 0, 1, 0]]
            corners = (boxes.corners_BD4[0] * scale)[valid]
            torch.testing.assert_close(found.masks.corners[index][valid], corners, rtol=1e-4, atol=1e-3)
            sides = corners[:, 2:] - corners[:, :2] + 1
            expected = torch.cat([corners[:, :2], sides], 1)
            torch.testing.assert_close(found.box[index][valid], expected, rtol=1e-4, atol=1e-3)
            regions = roi_align.Regions(boxes.corners_BD4, valid[None], 14)
            (features,) = ALIGN(levels[:4], [regions], REGION_STRIDES, 2)
            own = torch.sigmoid(model.mask_head(features, boxes.label_BD[0]))
            torch.testing.assert_close(found.masks.probability[index][valid], own[valid], rtol=1e-4, atol=1e-4)
    assert torch.equal(found.masks.size, original)
