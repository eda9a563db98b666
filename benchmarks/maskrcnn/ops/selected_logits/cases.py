"""Cases of the mask head's last layer for one class: 12 pictures with 128 slots each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Case, Draw, Pass, both_ways

FACTS = fixed_facts(Facts, "maskrcnn")


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    pictures: int,
    slots: int,
    objects: int,
    pixels: int,
    channels: int,
    classes: int,
) -> list[Pass]:
    """Make the forward and backward pass.

    Both read the features of slots that have an object. Backward writes the gradient of all slots. The first
    ``objects`` of the ``slots`` of a picture have an object. The other slots and their gradient hold NaN.
    """
    drawn = draw.integers(0, classes, pictures, slots)
    class_R = torch.where(torch.arange(slots, device=draw.device) < objects, drawn, -1).flatten()
    nothing = class_R < 0
    x = draw.normal(pictures * slots, pixels, channels).masked_fill_(nothing.view(-1, 1, 1), float("nan"))
    weight, bias = draw.normal(classes, channels), draw.normal(classes)
    gradient = draw.normal(pictures * slots, pixels, dtype=torch.float32).masked_fill_(nothing[:, None], float("nan"))
    features = float(pictures * objects * pixels * channels)
    moved = features * draw.dtype.itemsize + 4.0 * gradient.numel()
    return both_ways(
        lambda: function(x, weight, bias, class_R),
        [x, weight, bias],
        [gradient],
        moved=(moved, moved + float(x.numel() * draw.dtype.itemsize)),
        flops=(2 * features, 4 * features),
    )


CASES = (
    Case(
        "Mask R-CNN",
        passes,
        {
            "pictures": 12,
            "slots": FACTS.mask_slots,
            "objects": 50,
            "pixels": FACTS.mask_size**2,
            "channels": FACTS.pyramid_channels,
            "classes": FACTS.classes + 1,
        },
        tests=[
            {"pictures": 3, "slots": 7, "objects": 5, "pixels": 150, "channels": 200, "classes": 4},
            {"pictures": 1, "slots": 3, "objects": 1, "pixels": 11, "channels": 20, "classes": 5},
            {"pictures": 1, "slots": 2, "objects": 0, "pixels": 4, "channels": 8, "classes": 5},
            {"pictures": 0, "slots": 2, "objects": 1, "pixels": 6, "channels": 7, "classes": 5},
        ],
        gpu={"pictures": 3},
    ),
)
