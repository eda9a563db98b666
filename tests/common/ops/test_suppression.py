"""Test the reference of suppression against torchvision, picture by picture."""

import pytest
import torch
import torchvision

from common.ops import suppression


def candidates(seed, pictures, count, classes, decimals=4):
    random = torch.Generator().manual_seed(seed)
    corner = torch.randint(60, (pictures, count, 2), generator=random)
    boxes = torch.cat([corner, corner + torch.randint(1, 40, (pictures, count, 2), generator=random)], 2).float()
    score = torch.rand((pictures, count), generator=random).mul(10**decimals).round() / 10**decimals
    return boxes, score, torch.randint(classes, (pictures, count), generator=random)


def assert_as_torchvision(boxes, score, classes, threshold, keep):
    kept, there = suppression.suppress_reference(boxes, score, classes, threshold, keep)
    assert kept.shape == there.shape == (len(boxes), min(keep, boxes.shape[1]))
    for row in range(len(boxes)):
        real = (score[row] > -torch.inf).nonzero().squeeze(1)
        expected = torchvision.ops.batched_nms(boxes[row, real], score[row, real], classes[row, real], threshold)
        assert kept[row, there[row]].tolist() == real[expected][:keep].tolist()
        assert not kept[row, ~there[row]].any()


@pytest.mark.parametrize(("count", "classes", "decimals"), [(200, 1, 4), (190, 5, 1), (64, 2, 4), (1, 1, 4)])
@pytest.mark.parametrize("threshold", [0.25, 0.5])  # of fp32: torchvision's CPU and CUDA versions round others apart
def test_batches_are_suppressed_as_torchvision_does(count, classes, decimals, threshold):
    assert_as_torchvision(*candidates(count, 3, count, classes, decimals), threshold, keep=count)


def test_the_best_are_kept_where_only_some_may_be():
    boxes, score, classes = candidates(1, 3, 150, 4)
    _, there = suppression.suppress_reference(boxes, score, classes, 0.5, keep=10)
    assert there.all()
    assert_as_torchvision(boxes, score, classes, 0.5, keep=10)


def test_absent_candidates_are_not_kept_and_suppress_nothing():
    boxes, score, classes = candidates(2, 4, 100, 2)
    score[0] = -torch.inf
    score[1, 30:] = -torch.inf
    score[2, ::2] = -torch.inf
    assert_as_torchvision(boxes, score, classes, 0.5, keep=100)


def test_many_candidates_with_fractions_of_pixels():
    """With so many candidates, torchvision takes one class at a time and does not keep the order of equal scores."""
    random = torch.Generator().manual_seed(4)
    boxes, _, classes = candidates(3, 1, 1200, 3)
    boxes = boxes + torch.rand(boxes.shape, generator=random)
    score = torch.randperm(1200, generator=random)[None] / 1200
    assert_as_torchvision(boxes, score, classes, 0.5, keep=300)


def test_a_chain_longer_than_a_block_alternates():
    """Each box overlaps only its neighbours: the first suppresses the second, so the third stays."""
    length = 2 * suppression.BLOCK + 7
    left = torch.arange(length, dtype=torch.float32)
    boxes = torch.stack([left, torch.zeros(length), left + 2, torch.ones(length)], 1)
    kept, there = suppression.suppress_reference(boxes[None], -left[None], torch.zeros(1, length), 0.25, length)
    assert kept[there].tolist() == list(range(0, length, 2))


def test_no_candidates():
    kept, there = suppression.suppress_reference(torch.zeros(2, 0, 4), torch.zeros(2, 0), torch.zeros(2, 0), 0.5, 10)
    assert kept.shape == there.shape == (2, 0)


def area_of(box, pixel):
    return (box[2] - box[0] + pixel) * (box[3] - box[1] + pixel)


def kept_by_a_loop(boxes, scores, classes, threshold, pixel):
    """Return the indices of the kept boxes, computed one by one in float64."""
    kept = []
    for candidate in sorted(range(len(boxes)), key=lambda one: (-scores[one], one)):
        box, covered = boxes[candidate], False
        for better in kept:
            other = boxes[better]
            width = max(0.0, min(box[2], other[2]) - max(box[0], other[0]) + pixel)
            height = max(0.0, min(box[3], other[3]) - max(box[1], other[1]) + pixel)
            both = width * height
            union = area_of(box, pixel) + area_of(other, pixel) - both
            covered |= both > threshold * union and classes[better] == classes[candidate]
        if not covered:
            kept.append(candidate)
    return kept


@pytest.mark.parametrize("pixel", [0.0, 1.0])
@pytest.mark.parametrize("presorted", [False, True])
def test_pixels_that_count_as_part_of_a_box_are_those_of_a_loop(pixel, presorted):
    boxes, score, classes = candidates(5, 3, 150, 3)
    boxes[..., 2:] = boxes[..., :2] + (boxes[..., 2:] - boxes[..., :2]) // 4  # small, so that a pixel is much
    if presorted:
        score = score.sort(descending=True).values
    kept, there = suppression.suppress_reference(boxes, score, classes, 0.5, 150, pixel=pixel, presorted=presorted)
    for row in range(3):
        expected = kept_by_a_loop(boxes[row].tolist(), score[row].tolist(), classes[row].tolist(), 0.5, pixel)
        assert kept[row, there[row]].tolist() == expected


def test_without_classes_all_are_of_one():
    boxes, score, classes = candidates(6, 2, 100, 1)
    found = suppression.suppress_reference(boxes, score, None, 0.5, 100)
    expected = suppression.suppress_reference(boxes, score, classes, 0.5, 100)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
