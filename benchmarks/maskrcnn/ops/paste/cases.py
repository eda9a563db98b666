"""Cases of the virtual paste: 12 pictures of 480 x 640 pixels with 100 detections each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.ops.paste import Masks, Paste
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Case, Draw, Pass, size_of

FACTS = fixed_facts(Facts, "maskrcnn")
MOST_RUNS = 64
"""Capacity for the ends of runs, per picture column and detection. Smooth masks have fewer."""


def passes(
    function: Paste,
    draw: Draw,
    detections: int,
    size: int,
    height: tuple[int, int],
    width: tuple[int, int],
    side: float,
    there: float = 1.0,
    spanning: float = 0.0,
) -> list[Pass]:
    """Make the passes that count runs and write their ends, without the work of the host between them.

    Args:
        detections: number of slots for detections.
        size: height and width of a mask, in pixels.
        height: smallest and largest height of a picture, in pixels.
        width: smallest and largest width of a picture, in pixels.
        side: mean side of a box, in pixels.
        there: fraction of the slots that have a detection. The boxes of the other slots are NaN.
        spanning: fraction of the boxes that are at least as high as the picture.
    """
    rough = 3 * draw.normal(detections, 1, 5, 5, dtype=torch.float32) + 1
    probability = functional.interpolate(rough, (size, size), mode="bilinear")[:, 0].sigmoid().to(draw.dtype)
    heights, widths = (draw.integers(low, high + 1, detections) for low, high in (height, width))
    picture = torch.stack([heights, widths], 1)
    corner = draw.uniform(detections, 2, low=-0.2, dtype=torch.float32) * picture.flip(1)
    boxes = torch.cat([corner, corner + 2 * side * draw.uniform(detections, 2, dtype=torch.float32)], 1)
    spans = draw.uniform(detections, dtype=torch.float32) < spanning
    beyond = heights * draw.integers(0, 2, detections)
    boxes[:, 1] = torch.where(spans, -beyond, boxes[:, 1])
    boxes[:, 3] = torch.where(spans, heights - 1 + beyond, boxes[:, 3])
    exists = draw.uniform(detections, dtype=torch.float32) < there
    masks = Masks(probability, boxes.masked_fill(~exists[:, None], float("nan")), picture, exists)
    capacity = min(height[1] * width[1] + 1, MOST_RUNS * width[1])
    first = torch.arange(detections, device=draw.device) * capacity
    ends = torch.zeros(detections * capacity, dtype=torch.int32, device=draw.device)

    def write() -> Tensor:
        function.write_ends(masks, FACTS.mask_threshold, first, ends)
        return ends

    moved = size_of(*masks)
    return [
        Pass("forward", lambda: function.count_runs(masks, FACTS.mask_threshold), moved),
        Pass("write", write, moved),
    ]


SMALL = {"height": (1, 36), "width": (1, 36), "side": 20.0, "spanning": 0.4}

CASES = (
    Case(
        "Mask R-CNN",
        passes,
        {
            "detections": 12 * FACTS.detections,
            "size": FACTS.mask_size,
            "height": (480, 480),
            "width": (640, 640),
            "side": 140.0,
        },
        tests=[
            {**SMALL, "detections": 16, "there": 0.9},
            {**SMALL, "detections": 5, "size": 10},
            {"detections": 0},
        ],
        gpu={"detections": 300, "height": (1, 640), "width": (1, 640), "there": 0.9, "spanning": 0.2},
    ),
)
