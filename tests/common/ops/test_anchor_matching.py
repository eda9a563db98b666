"""Test the matching of anchors against torchvision, and SSD's rule against a loop."""

import pytest
import torch
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

from common.ops import anchor_matching
from common.ops.anchor_matching import BELOW, BETWEEN, MatchingRule, match_reference

RETINANET = MatchingRule(0.4, 0.5, rescue="every_best")
PROPOSALS = MatchingRule(0.5, 0.5)
SSD = MatchingRule(0.5, 0.5, exclusive=True, rescue="own_best")
COUNTS = [7, 1, 12, 3]


def drawn_boxes(seed, counts=COUNTS, anchors=300):
    """Return anchors, boxes and counts. Corners are on a coarse grid, so overlaps often tie; padding would match."""
    random = torch.Generator().manual_seed(seed)

    def boxes(*shape):
        corner = torch.randint(12, (*shape, 2), generator=random)
        return torch.cat([corner, corner + torch.randint(1, 6, (*shape, 2), generator=random)], -1).float()

    return boxes(anchors), boxes(len(counts), max(counts)), torch.tensor(counts)


def ssd_by_loops(anchors, boxes):
    """Match by the rule of SSD's reference, anchor by anchor and box by box."""
    overlap = box_iou(boxes, anchors).tolist()
    found = []
    for anchor in range(len(anchors)):
        column = [row[anchor] for row in overlap]
        best = max(column)
        found.append(column.index(best) if best > 0.5 else BELOW)
    for box, row in enumerate(overlap):
        found[row.index(max(row))] = box
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", [RETINANET, PROPOSALS])
def test_thresholds_and_ties_are_torchvisions(rule, seed):
    anchors, boxes, count = drawn_boxes(seed)
    theirs = Matcher(rule.high, rule.low, allow_low_quality_matches=rule.rescue is not None)
    matched = match_reference(anchors, boxes, count, rule)
    for row, real in enumerate(count.tolist()):
        assert matched[row].tolist() == theirs(box_iou(boxes[row, :real], anchors)).tolist()
    assert set(matched[matched < 0].tolist()) == ({BELOW, BETWEEN} if rule is RETINANET else {BELOW})


@pytest.mark.parametrize("seed", range(4))
def test_ssds_rule(seed):
    anchors, boxes, count = drawn_boxes(seed)
    matched = match_reference(anchors, boxes, count, SSD)
    for row, real in enumerate(count.tolist()):
        assert matched[row].tolist() == ssd_by_loops(anchors, boxes[row, :real])


def test_the_last_of_boxes_with_one_best_anchor_has_it():
    anchors = torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0]])
    boxes = torch.tensor([[[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 2.0, 2.0]]])
    assert match_reference(anchors, boxes, torch.tensor([2]), SSD).tolist() == [[1, BELOW]]


def test_an_overlap_equal_to_the_threshold():
    anchors = torch.tensor([[0.0, 0.0, 2.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    boxes, count = torch.tensor([[[0.0, 0.0, 1.0, 1.0]]]), torch.tensor([1])
    assert match_reference(anchors, boxes, count, PROPOSALS).tolist() == [[0, 0]]
    assert match_reference(anchors, boxes, count, SSD).tolist() == [[BELOW, 0]]


def overlap_by_hand(box, other, pixel):
    """Return the intersection over union of two boxes, in float64."""
    width = max(0.0, min(box[2], other[2]) - max(box[0], other[0]) + pixel)
    height = max(0.0, min(box[3], other[3]) - max(box[1], other[1]) + pixel)
    areas = [(one[2] - one[0] + pixel) * (one[3] - one[1] + pixel) for one in (box, other)]
    return width * height / (sum(areas) - width * height)


@pytest.mark.parametrize("pixel", [0.0, 1.0])
def test_pixels_that_count_as_part_of_a_box_are_those_of_a_loop(pixel):
    anchors, boxes, count = drawn_boxes(8)
    matched = match_reference(anchors, boxes, count, MatchingRule(0.3, 0.6, rescue="every_best", pixel=pixel))
    for row, real in enumerate(count.tolist()):
        table = [
            [overlap_by_hand(box, anchor, pixel) for anchor in anchors.tolist()] for box in boxes[row, :real].tolist()
        ]
        theirs = Matcher(0.6, 0.3, allow_low_quality_matches=True)(torch.tensor(table, dtype=torch.float64))
        assert matched[row].tolist() == theirs.tolist()
    other = MatchingRule(0.3, 0.6, rescue="every_best", pixel=1 - pixel)
    assert not torch.equal(matched, match_reference(anchors, boxes, count, other))


@pytest.mark.parametrize("rule", [RETINANET, PROPOSALS, SSD])
def test_pictures_may_have_anchors_of_their_own(rule):
    anchors, boxes, count = drawn_boxes(9)
    own = torch.stack([anchors.roll(shift, 0) for shift in range(len(COUNTS))])
    expected = [match_reference(own[row], boxes[row, None], count[row, None], rule)[0] for row in range(len(COUNTS))]
    assert torch.equal(match_reference(own, boxes, count, rule), torch.stack(expected))


@pytest.mark.parametrize("rule", [RETINANET, PROPOSALS, SSD])
@pytest.mark.parametrize("padding", [0.0, float("nan"), float("inf")])
def test_padding_and_pictures_without_boxes(rule, padding):
    anchors, boxes, _ = drawn_boxes(5)
    count = torch.tensor([7, 0, 12, 3])
    expected = match_reference(anchors, boxes, count, rule)
    padded = torch.where((torch.arange(12) >= count[:, None])[..., None], padding, boxes)
    assert torch.equal(match_reference(anchors, padded, count, rule), expected)
    assert (expected[1] == BELOW).all()
    assert match_reference(anchors, boxes[:, :0], count * 0, rule).tolist() == [[BELOW] * len(anchors)] * 4


@pytest.mark.parametrize("rule", [RETINANET, SSD])
def test_a_box_that_overlaps_no_anchor_rescues_none(rule):
    anchors, boxes, count = drawn_boxes(6, [1, 1])
    boxes[0] = torch.tensor([500.0, 500.0, 600.0, 600.0])
    boxes[1] = torch.tensor([3.0, 3.0, 3.0, 8.0])
    assert (match_reference(anchors, boxes, count, rule) == BELOW).all()


@pytest.mark.parametrize("rule", [RETINANET, SSD])
def test_a_few_anchors_at_a_time_change_nothing(rule, monkeypatch):
    arguments = drawn_boxes(7)
    whole = match_reference(*arguments, rule)
    monkeypatch.setattr(anchor_matching, "OVERLAPS_AT_ONCE", 7 * 12 * len(COUNTS))
    assert torch.equal(match_reference(*arguments, rule), whole)
