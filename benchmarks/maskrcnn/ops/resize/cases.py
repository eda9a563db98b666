"""Cases of the resize. Most pictures of COCO have 640 x 480 pixels; they become 1066 x 800, padded to 1344 x 800."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.pictures import resized_size
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Case, Draw, Pass

FACTS = fixed_facts(Facts, "maskrcnn")

Size = tuple[int, int]
"""Height and width, in pixels."""


def passes(
    function: Callable[..., Tensor], draw: Draw, slot: int, shape: Size, pictures: Sequence[tuple[Size, Size, bool]]
) -> list[Pass]:
    """Make the forward pass. It reads every pixel of the pictures and writes the whole batch.

    The parts of the slots outside the pictures hold noise.

    Args:
        slot: height and width of a slot, in pixels.
        shape: height and width of the batch.
        pictures: size before, size after, and whether the picture is mirrored.
    """
    pixels = draw.integers(0, 256, len(pictures), slot, slot, 3, dtype=torch.uint8)
    before, after, mirrored = zip(*pictures, strict=True) if pictures else ((), (), ())
    decoded = torch.tensor(before, dtype=torch.int32, device=draw.device).view(-1, 2)
    size = torch.tensor(after, dtype=torch.float32, device=draw.device).view(-1, 2)
    flipped = torch.tensor(mirrored, dtype=torch.bool, device=draw.device)

    def forward() -> tuple[Tensor, bool]:
        image = function(pixels, decoded, size, flipped, FACTS.mean, shape, draw.dtype)
        return image, image.is_contiguous(memory_format=torch.channels_last)

    read = sum(height * width for height, width in before)
    written = len(pictures) * shape[0] * shape[1] * draw.dtype.itemsize
    return [Pass("forward", forward, 3.0 * (read + written))]


def _published(*sizes: Size) -> tuple[tuple[Size, Size, bool], ...]:
    """Return pictures of these published sizes with their sizes in training. Every other picture is mirrored."""
    resized = [resized_size(*size, FACTS.min_size, FACTS.max_size) for size in sizes]
    return tuple((size, resized[index], index % 2 == 0) for index, size in enumerate(sizes))


SMALL = (
    ((12, 19), (12, 175), False),  # the height does not change
    ((1, 1), (5, 7), True),
    ((9, 15), (18, 30), True),  # factor 2: pixel centres lie at quarters
    ((24, 24), (11, 25), True),  # fills its slot, and becomes lower
)

CASES = (
    Case(
        "Mask R-CNN",
        passes,
        {"slot": FACTS.longest_side, "shape": (800, 1344), "pictures": _published(*[(480, 640)] * 12)},
        tests=[
            {"slot": 24, "shape": (18, 175), "pictures": SMALL},
            {"slot": 24, "shape": (18, 175), "pictures": ()},
        ],
        gpu={
            "shape": (1344, 1344),
            "pictures": _published((480, 640), (640, 427), (96, 640), (500, 333), (640, 640), (399, 601), (200, 640)),
        },
        exact=True,
    ),
)
