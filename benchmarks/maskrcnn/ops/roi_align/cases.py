"""Cases of RoIAlign: both heads, on the feature pyramid of 12 pictures of 800 x 1344 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.ops.roi_align.reference import Regions, RoiAlign
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Case, Draw, Pass, size_of

FACTS = fixed_facts(Facts, "maskrcnn")
OBJECTS = 8
"""Objects in a picture. The first regions lie around them."""


def special_boxes(strides: Sequence[int], height: int, width: int) -> list[list[float]]:
    """Return boxes at the size limits of levels, across borders, outside, empty, and as large as the picture."""
    boxes = []
    for stride in strides[1:]:
        side = 14.0 * stride - 1  # legacy: one less than the size
        boxes += [[-40.0, -30.0, side - 40, side - 30], [-40.0, -30.0, side - 40.1, side - 30]]
    return [
        *boxes,
        [3.0, 5.0, 3.0, 5.0],
        [0.0, 0.0, width - 1.0, height - 1.0],
        [-300.0, -300.0, -250.0, -250.0],
        [width + 300.0, 10.0, width + 320.0, 40.0],
        [width - 2.0, height - 3.0, width + 9.0, height + 8.0],
        [20.0, 20.0, 11.0, 8.0],
        [1.3, 2.7, 6.1, height + 0.5],
        [float(width), float(height), width + 0.5, height + 0.5],
    ]


def _boxes(draw: Draw, pictures: int, count: int, height: int, width: int) -> Tensor:
    """Return boxes inside the pictures, (B, R, 4) in fp32. The first ones lie around a few objects."""
    size = torch.tensor([width, height], dtype=torch.float32, device=draw.device)
    middle, share = (draw.uniform(pictures, count, 2, dtype=torch.float32).float() for _ in range(2))
    jitter = draw.uniform(pictures, count, 4, low=1.0, high=1.2, dtype=torch.float32).float()
    of_object = torch.arange(min(count, FACTS.mask_slots), device=draw.device) % OBJECTS
    for values in (middle, share):
        values[:, : len(of_object)] = values[:, of_object]
    half = (share**3 * 0.7 + 0.01) / 2
    corners = torch.cat([(middle - half) * size, (middle + half) * size], 2) * jitter
    return torch.minimum(corners.clamp(min=0), size.repeat(2) - 1)


def passes(
    function: RoiAlign,
    draw: Draw,
    pictures: int,
    channels: int,
    height: int,
    width: int,
    strides: Sequence[int],
    samples: int,
    heads: Sequence[tuple[int, int, int]],
    special: bool = False,
    without: int | None = None,
    channels_last: bool = True,
) -> list[Pass]:
    """Make the forward and backward pass.

    Forward reads levels and writes features. Backward reads the gradient of features and writes that of levels.

    Args:
        height, width: size of a picture, in pixels.
        strides: pixels between the cells of each level.
        samples: sampling points along each side of a bin.
        heads: for each head: slots per picture, number of slots that have a region, and bins along each side. Slots
            without a region hold NaN.
        special: whether :func:`special_boxes`, distributed over the pictures, replace some of the boxes. Regions then
            have the last slots instead of the first ones.
        without: index of a head whose features have no gradient.
        channels_last: layout of the levels and of the gradients of the features.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def planes(count: int, high: int, wide: int) -> Tensor:
        return draw.normal(count, high, wide, channels).permute(0, 3, 1, 2).contiguous(memory_format=layout)

    levels = [planes(pictures, -(-height // each), -(-width // each)).requires_grad_() for each in strides]
    count = max(slots for slots, _, _ in heads)
    boxes = _boxes(draw, pictures, count, height, width)
    if special:
        chosen = torch.tensor(special_boxes(strides, height, width), device=draw.device)
        own = len(chosen) // pictures
        chosen = chosen[draw.permutation(len(chosen))][: pictures * own].view(pictures, own, 4)
        boxes[:, :own] = chosen[:, :count]
    sets = []
    for slots, used, bins in heads:
        order = torch.arange(slots, device=draw.device).expand(pictures, -1)
        if special:
            order = order.flip(1)
        exists = order < used
        mixed = boxes.gather(1, order.unsqueeze(2).expand(-1, -1, 4))
        sets.append(Regions(mixed.masked_fill(~exists.unsqueeze(2), float("nan")), exists, bins))
    gradients = [planes(pictures * slots, bins, bins) for slots, _, bins in heads]
    asked = [head for head in range(len(heads)) if head != without]

    def forward() -> tuple[Tensor, ...]:
        return function(levels, sets, strides, samples)

    def backward() -> tuple[Tensor, ...]:
        features = forward()
        return torch.autograd.grad([features[head] for head in asked], levels, [gradients[head] for head in asked])

    moved = size_of(*levels, *gradients)
    return [
        Pass("forward", lambda: _with_layout(forward()), moved),
        Pass("backward", lambda: _with_layout(backward()), moved, after="forward"),
    ]


def _with_layout(tensors: Sequence[Tensor]) -> list[Any]:
    """Return each tensor, and whether it is channels_last."""
    return [(x, x.is_contiguous(memory_format=torch.channels_last)) for x in tensors]


SMALL = {"height": 24, "width": 36, "strides": (2, 4, 8, 16), "special": True}
"""Sizes of small pictures whose regions belong to all levels."""

CASES = (
    Case(
        "Mask R-CNN",
        passes,
        {
            "pictures": 12,
            "channels": FACTS.pyramid_channels,
            "height": 800,
            "width": 1344,
            "strides": (4, 8, 16, 32),
            "samples": FACTS.roi_samples,
            "heads": (
                (FACTS.roi_sampled, FACTS.roi_sampled, FACTS.box_resolution),
                (FACTS.mask_slots, 50, FACTS.mask_resolution),
            ),
        },
        tests=[
            {**SMALL, "pictures": 2, "channels": 12, "heads": ((3, 2, 2), (3, 2, 2))},
            {**SMALL, "pictures": 1, "channels": 272, "heads": ((2, 2, 2), (2, 2, 3)), "without": 0, "samples": 1},
            {**SMALL, "pictures": 1, "channels": 20, "heads": ((4, 3, 7),), "samples": 1, "channels_last": False},
            {**SMALL, "pictures": 1, "channels": 4, "heads": ((264, 16, 1), (0, 0, 7)), "samples": 1},
        ],
        gpu={"pictures": 4, "special": True, "heads": ((512, 460, 7), (128, 110, 14))},
        tolerance=2.0,
    ),
)
