"""Cases of the focal loss: the five levels of RetinaNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import detection


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    pictures: int,
    cells: Sequence[tuple[int, int]],
    anchors: int,
    classes: int,
    objects: float,
    spread: float = 1.0,
    alpha: float = 0.25,
    gamma: float = 2.0,
    loss_scale: float = 65536.0,
    other_memory: bool = False,
) -> list[Pass]:
    """Make the forward pass, which also computes and stores the gradients, and the backward pass, which returns them.

    Args:
        cells: rows and columns of each level.
        anchors: anchors per cell.
        objects: fraction of the anchors that have an object. As many anchors are ignored.
        spread: standard deviation of the logits.
        alpha: weight of positives in the focal loss; negatives have 1 - ``alpha``.
        gamma: exponent of the focal loss.
        other_memory: whether logits are contiguous and classes are int32. Otherwise logits are channels_last and
            classes are int64.
    """
    memory = torch.contiguous_format if other_memory else torch.channels_last
    channels = anchors * classes
    logits = [draw.normal(pictures, channels, *level, scale=spread).contiguous(memory_format=memory) for level in cells]
    bias = draw.uniform(channels, low=-6.0, high=-3.2)
    widths = [anchors * rows * columns for rows, columns in cells]
    share = draw.uniform(pictures, sum(widths), dtype=torch.float32)
    ids = draw.integers(0, classes, pictures, sum(widths), dtype=torch.int32 if other_memory else torch.int64)
    ids = torch.where(share < objects, ids, torch.where(share < 2 * objects, -2, -1).to(ids.dtype))
    weight = draw.uniform(pictures, low=0.05, high=0.1, dtype=torch.float32) / pictures
    scale = draw.rounded(torch.full((), loss_scale, device=draw.device), torch.float32)

    def forward() -> tuple[Tensor, ...]:
        levels = zip(logits, ids.split(widths, 1), strict=True)
        return tuple(function(level, bias, own, weight, alpha, gamma, scale) for level, own in levels)

    moved = 2 * size_of(*logits) + size_of(ids)
    return both_ways(forward, [*logits, bias], [scale] * len(cells), moved=(moved, 0.0))


CASES = (
    Case(
        "RetinaNet",
        passes,
        {
            "pictures": detection.PICTURES,
            "cells": [(side, side) for side in detection.LEVELS],
            "anchors": detection.ANCHORS,
            "classes": detection.CLASSES,
            "objects": 0.01,
        },
        tests=[
            {"pictures": 3, "cells": [(4, 5), (2, 1)], "anchors": 3, "classes": 16, "objects": 0.2, "spread": 3.0},
            {"pictures": 2, "cells": [(3, 5)], "anchors": 9, "classes": 3, "objects": 0.1, "gamma": 1.5, "spread": 3.0},
            {
                "pictures": 2,
                "cells": [(2, 3)],
                "anchors": 2,
                "classes": 12,
                "objects": 0.3,
                "other_memory": True,
                "spread": 3.0,
            },
            {"pictures": 1, "cells": [(3, 1)], "anchors": 1, "classes": 8, "objects": 0.3, "alpha": 0.6, "gamma": 0.0},
            {"pictures": 1, "cells": [(2, 2)], "objects": 0.1},
        ],
        gpu={"pictures": 2},
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
    ),
)
