"""Cases of the class entropies: the six levels of SSD300."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.ssd300.config import Facts
from benchmarks.ssd300.ops.head_results import HeadChannels
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Case, Draw, Pass, both_ways

FACTS = fixed_facts(Facts, "ssd300")
MULTIPLE = 8
"""The channels of a head are padded to a multiple of this number."""


def passes(
    function: Callable[..., tuple[Tensor, Tensor]],
    draw: Draw,
    pictures: int,
    classes: int,
    kinds: Sequence[int],
    sides: Sequence[int],
    objects: float,
    channels_last: bool = True,
) -> list[Pass]:
    """Make the forward and backward pass. Both read the logits and copy the offsets; backward writes gradients.

    Args:
        classes: number of classes, including the background.
        kinds: default boxes per cell, for each level.
        sides: rows and columns of cells, for each level.
        objects: fraction of the default boxes that have an object.
        channels_last: memory format of the results of the heads.
    """
    channels = [HeadChannels(count, classes) for count in kinds]
    results = []
    for head, side in zip(channels, sides, strict=True):
        padded = -(-(head.logits + head.offsets) // MULTIPLE) * MULTIPLE
        y_NCHW = draw.normal(pictures, padded, side, side, scale=3.0)
        y_NCHW[0, :classes, 0, 0] = draw.rounded(torch.linspace(-100, 100, classes, device=draw.device))
        memory = torch.channels_last if channels_last else torch.contiguous_format
        results.append(y_NCHW.contiguous(memory_format=memory))
    boxes = sum(count * side * side for count, side in zip(kinds, sides, strict=True))
    with_object = draw.uniform(pictures, boxes, dtype=torch.float32) < objects
    class_NA = torch.where(with_object, draw.integers(1, classes, pictures, boxes), 0)
    gradients = [draw.uniform(pictures, boxes, dtype=torch.float32), draw.uniform(pictures, boxes, 4)]
    logits, offsets = (float(pictures * boxes * width * draw.dtype.itemsize) for width in (classes, 4))
    rest = 2 * offsets + pictures * boxes * (8 + 2 * 4)  # the class, and two sums
    return both_ways(
        lambda: function(channels, results, class_NA), results, gradients, moved=(logits + rest, 2 * logits + rest)
    )


CASES = (
    Case(
        "SSD300",
        passes,
        {
            "pictures": 114,
            "classes": FACTS.classes + 1,
            "kinds": FACTS.boxes_per_cell,
            "sides": FACTS.level_sizes,
            "objects": 0.003,
        },
        tests=[
            {"pictures": 3, "kinds": (3, 2), "sides": (3, 1), "objects": 0.5},
            {"pictures": 3, "classes": 16, "kinds": (2, 3), "sides": (2, 1), "objects": 0.9},
            {"pictures": 2, "classes": 4, "kinds": (2,), "sides": (3,), "objects": 0.7, "channels_last": False},
        ],
        gpu={"pictures": 8},
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
    ),
)
