"""The reference of RoIAlign against torchvision's, region by region."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torchvision
from torch import Tensor

from benchmarks.maskrcnn.ops import roi_align
from benchmarks.maskrcnn.ops.roi_align import Regions
from benchmarks.maskrcnn.ops.roi_align.cases import special_boxes
from benchmarks.maskrcnn.ops.roi_align.reference import level_of

STRIDES = (4, 8, 16, 32)
ANYWHERE = 12
"""Boxes in a picture in addition to the special boxes."""


def expected(
    levels: Sequence[Tensor], boxes: Tensor, there: Tensor, strides: Sequence[int], bins: int, samples: int
) -> Tensor:
    """(B R, C, S, S) in float64, differentiable."""
    rows = []
    for picture in range(len(boxes)):
        for box, exists in zip(boxes[picture].double(), there[picture], strict=True):
            if not exists:
                rows.append(levels[0].new_zeros((1, levels[0].shape[1], bins, bins), dtype=torch.float64))
                continue
            x1, y1, x2, y2 = box.tolist()
            size = math.sqrt((x2 - x1 + 1) * (y2 - y1 + 1))
            finest = math.log2(strides[0])
            level = int(min(max(math.floor(4 + math.log2(size / 224 + 1e-6)) - finest, 0), 3))
            features = levels[level][picture : picture + 1].double()
            rows.append(
                torchvision.ops.roi_align(
                    features, [box[None]], bins, spatial_scale=1 / strides[level], sampling_ratio=samples, aligned=False
                )
            )
    return torch.cat(rows)


def regions(random: torch.Generator, pictures: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Boxes and whether they are there: across the borders, at the seams of levels, outside, without size, anywhere.

    Boxes that are not there are not numbers. Pictures share out what is special.
    """
    special = [*special_boxes(STRIDES, height, width), [torch.nan] * 4, [torch.nan] * 4]
    corner = torch.rand((pictures, ANYWHERE, 2), generator=random) * torch.tensor([width, height]) * 0.9
    size = torch.rand((pictures, ANYWHERE, 2), generator=random) ** 2 * width
    boxes = torch.cat([corner - 5, corner - 5 + size], 2)
    boxes = torch.cat([torch.tensor(special).view(-1, pictures, 4).transpose(0, 1), boxes], 1)
    order = torch.rand(boxes.shape[:2], generator=random).argsort(1)
    boxes = boxes.gather(1, order.unsqueeze(2).expand_as(boxes))
    return boxes, ~boxes.isnan().any(2)


def pyramid(
    random: torch.Generator,
    pictures: int,
    channels: int,
    height: int,
    width: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Levels of pictures of this many px, channels_last."""
    return [
        torch.randn((pictures, -(-height // stride), -(-width // stride), channels), generator=random)
        .to(dtype)
        .permute(0, 3, 1, 2)
        for stride in STRIDES
    ]


ALIGN = roi_align.ROI_ALIGN.reference


def aligned(levels, boxes, there, strides, bins, samples):
    """Return the features of one set of regions."""
    (found,) = ALIGN(levels, [Regions(boxes, there, bins)], strides, samples)
    return found


@pytest.mark.parametrize(("bins", "samples"), [(7, 2), (3, 1), (2, 3)])
def test_features_and_gradients_are_torchvisions(bins, samples):
    random = torch.Generator().manual_seed(bins)
    levels = [level.requires_grad_() for level in pyramid(random, 2, 5, 120, 200, torch.float64)]
    boxes, there = regions(random, 2, 120, 200)
    assert set(level_of(boxes[there][None], STRIDES)[0].tolist()) == {0, 1, 2, 3}
    found = aligned(levels, boxes, there, STRIDES, bins, samples)
    wanted = expected(levels, boxes, there, STRIDES, bins, samples)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    gradient = torch.randn(found.shape, generator=random, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(found, levels, gradient), torch.autograd.grad(wanted, levels, gradient), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_slots_without_a_region_read_nothing():
    levels = [torch.full_like(level, torch.nan) for level in pyramid(torch.Generator(), 2, 3, 64, 64, torch.float32)]
    levels = [level.requires_grad_() for level in levels]
    boxes, there = torch.tensor([4.0, 4.0, 30.0, 30.0]).expand(2, 5, 4), torch.zeros((2, 5), dtype=torch.bool)
    found = aligned(levels, boxes, there, STRIDES, 7, 2)
    assert not found.any()
    gradients = torch.autograd.grad(found, levels, torch.full_like(found, torch.inf))
    assert not any(gradient.any() for gradient in gradients)


def test_two_sets_of_regions_and_none():
    random = torch.Generator().manual_seed(2)
    levels = pyramid(random, 2, 4, 64, 80, torch.float32)
    boxes, there = regions(random, 2, 64, 80)
    sets = [Regions(boxes, there, 7), Regions(boxes[:, :4], there[:, :4], 14), Regions(boxes[:, :0], there[:, :0], 2)]
    together = ALIGN(levels, sets, STRIDES, 2)
    assert [tuple(one.shape) for one in together] == [(2 * boxes.shape[1], 4, 7, 7), (8, 4, 14, 14), (0, 4, 2, 2)]
    for one, own in zip(together, sets, strict=True):
        assert torch.equal(one, aligned(levels, own.boxes_BR4, own.there_BR, STRIDES, own.resolution, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_fp32(dtype):
    random = torch.Generator().manual_seed(3)
    levels, (boxes, there) = pyramid(random, 1, 3, 64, 80, dtype), regions(random, 1, 64, 80)
    found = aligned(levels, boxes, there, STRIDES, 7, 2)
    exact = aligned([level.double() for level in levels], boxes, there, STRIDES, 7, 2)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_what_does_not_fit_is_refused():
    levels = pyramid(torch.Generator(), 2, 3, 64, 64, torch.float32)
    boxes, there = torch.zeros((2, 5, 4)), torch.ones((2, 5), dtype=torch.bool)
    with pytest.raises(ValueError, match="4 of the same pictures"):
        aligned(levels[:3], boxes, there, STRIDES[:3], 7, 2)
    with pytest.raises(ValueError, match=r"boxes \(1, 5, 4\)"):
        aligned(levels, boxes[:1], there[:1], STRIDES, 7, 2)
    with pytest.raises(ValueError, match=r"slots \(2, 4\)"):
        aligned(levels, boxes, there[:, 1:], STRIDES, 7, 2)
