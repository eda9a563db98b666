"""Targets and losses against torchvision's, which takes pictures one by one and boxes as they are, without padding."""

import pytest
import torch
from torchvision_retinanet import CLASSES, IMAGE_SIZE, as_torchvision_has_it, levels_of, torchvision_retinanet

from benchmarks.retinanet.config import Facts
from benchmarks.retinanet.loss import AnchorTargets, DetectionLoss, OffsetLoss
from benchmarks.retinanet.model import anchors
from common.mlperf.fixed import fixed_facts

CAPACITY = 12
"""Largest number of boxes in a batch."""


def boxes_of(counts, generator):
    """Boxes, classes and counts of pictures, with rubbish behind the boxes."""
    boxes = torch.full((len(counts), CAPACITY, 4), -7.0)
    label = torch.full((len(counts), CAPACITY), 10**6)
    for picture, count in enumerate(counts):
        corner = torch.randint(0, 60, (count, 2), generator=generator).float()
        side = torch.randint(8, 36, (count, 2), generator=generator).float()
        boxes[picture, :count] = torch.cat([corner, corner + side], 1)
        label[picture, :count] = torch.randint(CLASSES, (count,), generator=generator)
    return boxes, label, torch.tensor(counts)


def facts(**changes):
    return fixed_facts(Facts, "retinanet", classes=CLASSES, image_size=IMAGE_SIZE, **changes)


def targets_of(boxes, label, count):
    return AnchorTargets(facts(), anchors(IMAGE_SIZE), {"anchor_matching": "reference"})(boxes, label, count)


@pytest.mark.parametrize("counts", [[3, 1, 12], [5, 0, 2], [0, 0, 0]], ids=str)
def test_losses_and_their_gradients_are_torchvisions(counts):
    generator = torch.Generator().manual_seed(sum(counts))
    levels, bias = levels_of(len(counts), generator, torch.float64)
    leaves = [tensor.requires_grad_() for level in levels for tensor in (level.logits_NCHW, level.offsets_NCHW)]
    leaves.append(bias.requires_grad_())
    boxes, label, count = boxes_of(counts, generator)

    outputs = {name: torch.cat(parts, 1) for name, parts in as_torchvision_has_it(levels, bias).items()}
    model = torchvision_retinanet()
    given = [
        {"boxes": boxes[picture, :own].double(), "labels": label[picture, :own]} for picture, own in enumerate(counts)
    ]
    expected = model.compute_loss(given, outputs, [anchors(IMAGE_SIZE).double()] * len(counts))
    gradients = torch.autograd.grad(sum(expected.values()), leaves)

    targets = targets_of(boxes, label, count)
    loss = DetectionLoss(CLASSES, 0.25, 2.0, {"focal_loss": "reference"}, torch.device("cpu"), torch.float64)
    scale = torch.tensor(1.0, dtype=torch.float64)
    found = loss(levels, bias, targets["class"], targets["offsets"].double(), targets["weight"].double(), scale)
    assert found.classes.item() == pytest.approx(expected["classification"].item(), rel=1e-6)
    assert found.boxes.item() == pytest.approx(expected["bbox_regression"].item(), rel=1e-6, abs=1e-12)
    for own, others in zip(torch.autograd.grad(found.classes + found.boxes, leaves), gradients, strict=True):
        torch.testing.assert_close(own, others, rtol=1e-5, atol=1e-9)


def test_an_offset_that_does_not_count_may_be_anything_and_has_no_gradient():
    generator = torch.Generator().manual_seed(5)
    levels, _ = levels_of(2, generator)
    boxes, label, count = boxes_of([2, 3], generator)
    targets = targets_of(boxes, label, count)
    arguments = targets["class"], targets["offsets"], targets["weight"]
    offsets = [level.offsets_NCHW for level in levels]
    has_box = (targets["class"] >= 0).split([level[0].numel() // 4 for level in offsets], 1)
    expected = OffsetLoss.apply(*arguments, *offsets)
    changed = []
    for level, own in zip(offsets, has_box, strict=True):
        there = own.view(2, *level.shape[2:], 9).permute(0, 3, 1, 2).repeat_interleave(4, 1)
        changed.append(torch.where(there, level, torch.inf).contiguous(memory_format=torch.channels_last))
    leaves = [level.requires_grad_() for level in changed]
    found = OffsetLoss.apply(*arguments, *leaves)
    assert found == expected
    for level, gradient in zip(leaves, torch.autograd.grad(found, leaves), strict=True):
        assert torch.equal(gradient != 0, level.isfinite())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_offsets_of_half_precision_have_the_gradient_of_their_values_times_the_scale(dtype):
    generator, scale = torch.Generator().manual_seed(6), 1024.0
    levels, _ = levels_of(2, generator, dtype)
    boxes, label, count = boxes_of([4, 1], generator)
    targets = targets_of(boxes, label, count)
    leaves = [level.offsets_NCHW.requires_grad_() for level in levels]
    loss = OffsetLoss.apply(targets["class"], targets["offsets"], targets["weight"], *leaves)
    found = torch.autograd.grad(loss * scale, leaves)

    wide = [level.detach().double().requires_grad_() for level in leaves]
    rows = torch.cat([level.permute(0, 2, 3, 1).reshape(2, -1, 4) for level in wide], 1)
    counts = (targets["class"] >= 0).unsqueeze(2)
    distance = torch.where(counts, (rows - targets["offsets"]).abs(), 0.0)
    expected = (distance * targets["weight"].double()[:, None, None]).sum()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for own, others in zip(found, torch.autograd.grad(expected * scale, wide), strict=True):
        assert own.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(own, others.to(dtype), rtol=1e-2, atol=0)


def test_offsets_keep_one_number_each_for_the_gradient():
    generator, kept = torch.Generator().manual_seed(7), []
    levels, _ = levels_of(2, generator, torch.float16)
    boxes, label, count = boxes_of([4, 1], generator)
    targets = targets_of(boxes, label, count)
    leaves = [level.offsets_NCHW.requires_grad_() for level in levels]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        OffsetLoss.apply(targets["class"], targets["offsets"], targets["weight"], *leaves)
    assert sum(tensor.numel() for tensor in kept) == sum(leaf.numel() for leaf in leaves)
