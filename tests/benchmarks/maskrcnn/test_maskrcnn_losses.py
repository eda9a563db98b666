"""The losses of region proposals and boxes against loops over the slots that count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.maskrcnn.loss import box_losses, rpn_losses
from benchmarks.maskrcnn.model import RpnOutput
from benchmarks.maskrcnn.targets import RoiSample, RpnSample
from tests.benchmarks.maskrcnn.list_iteration import smooth_l1

SIZES = ((3, 4), (2, 2))
"""Cells of two levels, with three anchors each: 48 anchors."""
ANCHORS = 48
CLASSES = 5


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def levels(seed: int) -> list[RpnOutput]:
    found = []
    for number, (height, width) in enumerate(SIZES):
        outputs = (
            drawn(seed + 10 * number + part, 2, 3 * numbers, height, width) for part, numbers in ((0, 1), (1, 4))
        )
        found.append(RpnOutput(*(output.contiguous(memory_format=torch.channels_last) for output in outputs)))
    return found


def at(outputs: list[RpnOutput], picture: int, anchor: int) -> tuple[Tensor, Tensor]:
    """Logit and offsets of an anchor, found by counting rows, columns and shapes."""
    for level, (height, width) in zip(outputs, SIZES, strict=True):
        if anchor < height * width * 3:
            row, column, shape = anchor // (width * 3), anchor // 3 % width, anchor % 3
            offsets = level.deltas_NAHW[picture, 4 * shape : 4 * shape + 4, row, column]
            return level.logits_NAHW[picture, shape, row, column], offsets
        anchor -= height * width * 3
    raise AssertionError(anchor)


COUNTS = [((2, 1), (5, 4)), ((0, 3), (0, 3)), ((0, 0), (4, 0)), ((0, 0), (0, 0))]
"""Positives and all samples of two pictures."""


@pytest.mark.parametrize(("positives", "total"), COUNTS)
def test_rpn_losses_are_means_over_all_samples_of_the_micro_batch(positives, total):
    outputs, beta = levels(1), 1 / 9
    index_BN = torch.stack([torch.randperm(ANCHORS, generator=torch.Generator().manual_seed(n))[:6] for n in (1, 2)])
    offsets_BN4 = drawn(7, 2, 6, 4).detach()
    entropy = distance = torch.zeros((), dtype=torch.float64)
    for picture in range(2):
        for slot in range(total[picture]):
            logit, offsets = at(outputs, picture, int(index_BN[picture, slot]))
            entropy = entropy - (logit if slot < positives[picture] else -logit).sigmoid().log()
            if slot < positives[picture]:
                distance = distance + smooth_l1(offsets, offsets_BN4[picture, slot].tolist(), beta)
    sampled = max(sum(total), 1)
    leaves = [tensor for output in outputs for tensor in output]
    expected = (
        torch.autograd.grad((entropy + 3 * distance) / sampled, leaves, allow_unused=True, retain_graph=True)
        if (sum(total))
        else [None] * 4
    )

    sample = RpnSample(index_BN, torch.tensor(positives), torch.tensor(total), offsets_BN4)
    objectness, boxes = rpn_losses(outputs, sample, beta)
    assert objectness.item() == pytest.approx(float(entropy) / sampled, rel=1e-12)
    assert boxes.item() == pytest.approx(float(distance) / sampled, rel=1e-12)
    found = torch.autograd.grad(objectness + 3 * boxes, leaves)
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if wanted is None else wanted)


@pytest.mark.parametrize(("positives", "total"), COUNTS)
def test_box_losses_take_the_offsets_of_the_objects_class(positives, total):
    logits_RK, deltas_RC = drawn(3, 12, CLASSES + 1), drawn(4, 12, 4 * (CLASSES + 1))
    offsets_BR4 = drawn(5, 2, 6, 4).detach()
    label_BR = torch.full((2, 6), -1)
    entropy = distance = 0.0
    for picture in range(2):
        for slot in range(total[picture]):
            row = 6 * picture + slot
            label = 1 + (picture + slot) % CLASSES if slot < positives[picture] else 0
            label_BR[picture, slot] = label
            numbers = [math.exp(logit) for logit in logits_RK[row].tolist()]
            entropy -= math.log(numbers[label] / sum(numbers))
            if slot < positives[picture]:
                found = deltas_RC[row, 4 * label : 4 * label + 4]
                distance += smooth_l1(found, offsets_BR4[picture, slot].tolist(), 1.0).item()
    sample = RoiSample(
        torch.zeros((2, 6, 4)), label_BR, torch.zeros((2, 6), dtype=torch.int64),
        torch.tensor(positives), torch.tensor(total), offsets_BR4,
    )  # fmt: skip
    classes, boxes = box_losses(logits_RK, deltas_RC, sample, 1.0)
    sampled = max(sum(total), 1)
    assert classes.item() == pytest.approx(entropy / sampled, rel=1e-12)
    assert boxes.item() == pytest.approx(distance / sampled, rel=1e-12)
    d_logits, d_deltas = torch.autograd.grad(classes + boxes, (logits_RK, deltas_RC))
    counted = torch.tensor([slot < total[picture] for picture in range(2) for slot in range(6)])
    assert torch.equal(d_logits.abs().sum(1) > 0, counted)
    rows = [6 * picture + slot for picture in range(2) for slot in range(positives[picture])]
    expected = torch.zeros_like(d_deltas)
    for row in rows:
        label = int(label_BR.flatten()[row])
        off = deltas_RC[row, 4 * label : 4 * label + 4].detach() - offsets_BR4.reshape(12, 4)[row]
        expected[row, 4 * label : 4 * label + 4] = off.clamp(-1, 1) / sampled
    torch.testing.assert_close(d_deltas, expected)


def test_half_precision_is_widened_before_it_is_summed():
    outputs = [RpnOutput(*(tensor.detach().bfloat16() for tensor in level)) for level in levels(1)]
    sample = RpnSample(torch.arange(6).repeat(2, 1), torch.tensor([2, 2]), torch.tensor([6, 6]), torch.zeros((2, 6, 4)))
    assert {loss.dtype for loss in rpn_losses(outputs, sample, 1 / 9)} == {torch.float32}
