"""Targets and loss against plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from small_ssd300 import FACTS, SMALL

from benchmarks.ssd300.model import multibox_loss
from benchmarks.ssd300.targets import Targets, reference_boxes, reference_rows

CPU = torch.device("cpu")


def overlap(a: list[float], b: list[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return both / union if both > 0 else 0.0


def plain_targets(boxes: list[list[float]], labels: list[int]) -> tuple[list[int], list[list[float]]]:
    """Class and offsets of each default box in the reference's order, by the rule in words."""
    anchors = reference_boxes(SMALL).double().tolist()
    classes, offsets = [0] * len(anchors), [[0.0] * 4 for _ in anchors]
    owner = {}
    for number, box in enumerate(boxes):
        shares = [overlap(box, anchor) for anchor in anchors]
        if max(shares) > 0:
            owner[shares.index(max(shares))] = number
    for row, anchor in enumerate(anchors):
        best = max(range(len(boxes)), key=lambda number: overlap(boxes[number], anchor), default=None)
        if best is not None and overlap(boxes[best], anchor) <= 0.5:
            best = None
        best = owner.get(row, best)
        if best is None:
            continue
        (x1, y1, x2, y2), (a1, b1, a2, b2) = boxes[best], anchor
        classes[row] = labels[best]
        offsets[row] = [
            ((x1 + x2) - (a1 + a2)) / 2 / (a2 - a1) / 0.1,
            ((y1 + y2) - (b1 + b2)) / 2 / (b2 - b1) / 0.1,
            math.log((x2 - x1) / (a2 - a1)) / 0.2,
            math.log((y2 - y1) / (b2 - b1)) / 0.2,
        ]
    return classes, offsets


def random_boxes(counts: list[int], capacity: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    corners = torch.rand((len(counts), capacity, 2, 2), generator=random).sort(2).values.flatten(2)
    labels = torch.randint(1, 4, (len(counts), capacity), generator=random)
    count = torch.tensor(counts)
    padding = torch.arange(capacity) >= count.unsqueeze(1)
    corners[padding] = torch.nan  # of any value
    return corners, labels, count


def test_targets_are_those_of_plain_loops_and_padding_is_never_looked_for():
    boxes, labels, count = random_boxes([4, 0, 1, 6], 6, seed=0)
    boxes[3, 5] = boxes[3, 4]  # the same box twice: the last one has their default box
    labels[3, 4], labels[3, 5] = 1, 2
    classes, offsets = Targets(SMALL, {}, CPU)(boxes, labels, count)
    rows = reference_rows(SMALL)
    for picture, number in enumerate(count.tolist()):
        expected = plain_targets(boxes[picture, :number].tolist(), labels[picture, :number].tolist())
        assert classes[picture].tolist() == torch.tensor(expected[0])[rows].tolist()
        torch.testing.assert_close(
            offsets[picture].double(), torch.tensor(expected[1]).double()[rows], atol=1e-5, rtol=1e-5
        )
    assert int((classes[1] != 0).sum()) == 0
    assert (classes[3] == 2).any()


def test_a_box_without_area_is_never_looked_for():
    boxes = torch.tensor([[[0.5, 0.5, 0.5, 0.7], [0.1, 0.1, 0.4, 0.4]]])
    classes, offsets = Targets(SMALL, {}, CPU)(boxes, torch.tensor([[1, 2]]), torch.tensor([2]))
    assert set(classes[0].tolist()) == {0, 2}
    assert offsets.isfinite().all()


def test_of_equal_overlaps_the_references_first_default_box_has_the_box():
    """A box around a cell's centre meets squares of two cells alike; the reference's order decides, not the heads'."""
    anchors = reference_boxes(SMALL)
    middle = (anchors[27] + anchors[28]) / 2  # between two neighbours of the first kind
    overlaps = torch.tensor([overlap(middle.tolist(), anchor) for anchor in anchors.tolist()])
    classes, _ = Targets(SMALL, {}, CPU)(middle.view(1, 1, 4), torch.tensor([[3]]), torch.tensor([1]))
    found = reference_rows(SMALL)[classes[0] == 3].tolist()
    assert int(overlaps.argmax()) in found


def plain_loss(logits, offsets, classes, targets, negatives):
    """The loss of a picture as a sum of scalars; lists of float64 tensors carry the gradient."""
    entropy = [torch.logsumexp(row, 0) - row[label] for row, label in zip(logits, classes, strict=True)]
    positive = [row for row, label in enumerate(classes) if label]
    background = sorted((row for row, label in enumerate(classes) if not label), key=lambda row: -entropy[row].item())
    total = sum(
        (entropy[row] for row in positive + background[: negatives * len(positive)]),
        logits.sum() * 0 + offsets.sum() * 0,
    )
    for row in positive:
        for predicted, wanted in zip(offsets[row], targets[row], strict=True):
            distance = (predicted - wanted).abs()
            total = total + (0.5 * distance**2 if distance < 1 else distance - 0.5)
    return total / max(1, len(positive))


@pytest.mark.parametrize("positives", [[3, 0, 1], [0, 0, 0], [40, 90, 2]])
def test_loss_and_gradients_are_those_of_plain_loops(positives):
    random = torch.Generator().manual_seed(sum(positives))
    boxes = 96  # with 40 positives three times as many negatives are not there; with 90 hardly any
    logits = torch.randn((3, boxes, 4), generator=random, dtype=torch.float64).mul(3).requires_grad_()
    offsets = torch.randn((3, boxes, 4), generator=random, dtype=torch.float64).mul(2).requires_grad_()
    targets = torch.randn((3, boxes, 4), generator=random, dtype=torch.float64)
    classes = torch.zeros((3, boxes), dtype=torch.int64)
    for picture, count in enumerate(positives):
        chosen = torch.randperm(boxes, generator=random)[:count]
        classes[picture, chosen] = torch.randint(1, 4, (count,), generator=random)
    found = multibox_loss(logits, offsets, classes, targets, FACTS.negatives)
    torch.testing.assert_close(found.total, found.boxes + found.classes)
    mine = torch.autograd.grad(found.total, [logits, offsets])
    expected = (
        sum(plain_loss(*parts, negatives=3) for parts in zip(logits, offsets, classes.tolist(), targets, strict=True))
        / 3
    )
    torch.testing.assert_close(found.total, expected)
    torch.testing.assert_close(mine, torch.autograd.grad(expected, [logits, offsets]))


def test_half_precision_is_computed_in_fp32():
    random = torch.Generator().manual_seed(0)
    logits, offsets = (torch.randn((2, 50, width), generator=random).half() for width in (81, 4))
    classes = torch.randint(0, 81, (2, 50), generator=random) * (torch.rand((2, 50), generator=random) < 0.2)
    targets = torch.randn((2, 50, 4), generator=random)
    half = multibox_loss(logits, offsets, classes, targets, FACTS.negatives)
    wide = multibox_loss(logits.double(), offsets.double(), classes, targets.double(), FACTS.negatives)
    assert half.total.dtype == torch.float32
    torch.testing.assert_close(half.total.double(), wide.total, rtol=1e-6, atol=1e-6)


def test_the_loss_begins_where_81_equal_classes_put_it():
    """A positive and its three negatives add ln 81 each where all classes are alike."""
    boxes, labels, count = random_boxes([7, 7], 7, seed=5)
    classes, offsets = Targets(FACTS, {}, CPU)(boxes, labels, count)
    outputs = torch.zeros((2, 8732, 4))
    losses = multibox_loss(torch.zeros((2, 8732, 81)), outputs, classes, offsets, FACTS.negatives)
    assert float(losses.classes) == pytest.approx(4 * math.log(81), rel=1e-5)
