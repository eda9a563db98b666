"""Cases of the operations of an evaluation, which add windows to a volume and count voxels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.unet3d.ops.sizes import FACTS
from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.local_convolution.cases import volumes

Size3 = tuple[int, int, int]


def _part(sums: Tensor, origin: Size3, size: Size3) -> Tensor:
    """Return the view of ``size`` voxels that starts at ``origin``."""
    for axis in range(3):
        sums = sums.narrow(axis, origin[axis], size[axis])
    return sums


def added(
    function: Callable[..., Any],
    draw: Draw,
    windows: int,
    classes: int,
    window: Size3,
    volume: Size3,
    origin: Size3,
    channels_last: bool = True,
) -> list[Pass]:
    """Make the forward pass, which adds all windows at the same position. It returns the sums of the whole volume."""
    sums = draw.normal(*volume, classes, dtype=torch.float32)
    importance = [draw.uniform(size, dtype=torch.float32) for size in window]
    logits = volumes(draw, windows, classes, window, channels_last=channels_last)
    place = _part(sums, origin, window)

    def forward() -> Tensor:
        for logits_KDHW in logits:
            function(place, logits_KDHW, importance)
        return sums

    return [Pass("forward", forward, size_of(logits) + 2.0 * windows * size_of(place))]


def counted(
    function: Callable[..., Any], draw: Draw, classes: int, window: Size3, volume: Size3, origin: Size3
) -> list[Pass]:
    """Make the forward pass for a part of a volume. Some sums are equal; some are NaN, which counts as the largest."""
    place = _part(draw.normal(*volume, classes, dtype=torch.float32).round_(decimals=1), origin, window)
    place[0, 0, 0], place[-1, -1, -1, -1] = torch.nan, torch.nan
    label = draw.integers(0, classes, *window, dtype=torch.uint8)
    counts = torch.full((classes, 3), 1 << 40, device=draw.device)

    def forward() -> Tensor:
        function(place, label, counts)
        return counts

    return [Pass("forward", forward, size_of(place, label))]


MIDDLE = {"volume": (256, 256, 256), "origin": (64, 64, 64), "classes": FACTS.classes}

ADD_WINDOW = (
    Case(
        "3D U-Net",
        added,
        {**MIDDLE, "windows": 4, "window": FACTS.input_shape},
        tests=[
            {"windows": 2, "window": (3, 20, 50), "volume": (8, 24, 56), "origin": (2, 1, 3)},
            {
                "windows": 2,
                "window": (5, 7, 47),
                "volume": (5, 9, 49),
                "origin": (0, 2, 1),
                "classes": 5,
                "channels_last": False,
            },
            {"windows": 1, "window": (16, 16, 128), "volume": (17, 17, 129), "origin": (1, 0, 0), "classes": 2},
        ],
        gpu={"windows": 2, "volume": (192, 256, 130), "origin": (64, 128, 2), "channels_last": False},
        tolerance=0.1,
    ),
)

COUNT_CLASSES = (
    Case(
        "3D U-Net",
        counted,
        {**MIDDLE, "window": (256, 256, 256), "origin": (0, 0, 0)},
        tests=[
            {"window": (1, 1, 1), "volume": (2, 3, 2), "origin": (1, 1, 1)},
            {"window": (17, 16, 31), "volume": (19, 19, 32), "origin": (1, 1, 0), "classes": 5},
            {"window": (4, 8, 128), "volume": (4, 8, 130), "origin": (0, 0, 2), "classes": 2},
        ],
        gpu={"window": (414, 430, 440), "volume": (420, 448, 448), "origin": (3, 10, 5)},
        dtypes=(torch.float32,),
        exact=True,
    ),
)
