"""Cases of the convolutions of RetinaNet with a ResNeXt-50 trunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import detection


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    pictures: int,
    channels: int,
    filters: int,
    height: int,
    width: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    relu: bool = True,
    added: bool = False,
    bias: str = "frozen",
    channels_last: bool = True,
) -> list[Pass]:
    """Make the forward and backward passes; only the forward pass if ``bias`` is ``all frozen``.

    Inputs and weights are small integers, and biases are integers plus 0.5; rounding never changes a result's sign.

    Args:
        bias: ``trained``, ``frozen``, or ``all frozen`` if no parameter is trained.
    """
    memory = torch.channels_last if channels_last else torch.contiguous_format

    def integers(most: int, *shape: int) -> Tensor:
        drawn = draw.rounded(draw.integers(-most, most + 1, *shape))
        return drawn.contiguous(memory_format=memory) if len(shape) == 4 else drawn

    y_shape = pictures, filters, height, width
    x = integers(2, pictures, channels, (height - 1) * stride + 1, width * stride)
    weight, bias_C = integers(1, filters, channels // groups, kernel, kernel), integers(9, filters) + 0.5
    residual = integers(9, *y_shape) if added else None
    dy = draw.normal(*y_shape).contiguous(memory_format=memory)

    def forward() -> Tensor:
        return function(x, weight, bias_C, stride, kernel // 2, groups, relu, residual)

    x_bytes, y_bytes = size_of(x), size_of(dy)
    flops = 2.0 * math.prod((pictures, height, width)) * weight.numel()
    moved = x_bytes + (1 + added) * y_bytes
    if bias == "all frozen":
        return [Pass("forward", torch.no_grad()(forward), moved, flops)]
    trained = {"trained": [bias_C], "frozen": []}[bias]
    return both_ways(
        forward,
        [x, weight, *trained, *([] if residual is None else [residual])],
        [dy],
        moved=(moved, 2 * x_bytes + (1 + relu) * y_bytes),
        flops=(flops, 2 * flops),
    )


def layer(name: str, channels: int, filters: int, side: int, kernel: int, **case: Any) -> Case:
    """Return the case of a layer whose result is ``side`` x ``side``; ``case`` contains further sizes and ``tests``."""
    tests: Sequence[Mapping[str, Any]] = case.pop("tests", ())
    sizes = {"channels": channels, "filters": filters, "height": side, "width": side, "kernel": kernel}
    return Case(
        name,
        passes,
        {"pictures": detection.PICTURES, **sizes, **case},
        tests=tests,
        gpu={"pictures": 2, "height": side - side // 5, "width": side - side // 4},
        dtypes=(torch.bfloat16, torch.float16),
    )


SMALL = {"pictures": 3, "channels": 8, "filters": 72, "height": 11, "width": 10}
"""Sizes for two blocks of columns, and for programs with several tiles."""
GROUPED = {"pictures": 2, "channels": 40, "filters": 40, "height": 9, "width": 8, "groups": 5}

CASES = (
    layer("stem", 3, 64, 400, 7, stride=2, bias="all frozen", tests=[{**SMALL, "kernel": 3}, {**SMALL, "relu": False}]),
    layer(
        "conv3 of layer2",
        256,
        512,
        100,
        1,
        added=True,
        tests=[
            SMALL,
            {**SMALL, "kernel": 3, "stride": 2, "bias": "trained"},
            {**SMALL, "relu": False, "bias": "trained", "channels_last": False},
            {"pictures": 1, "channels": 16, "filters": 16, "height": 16, "width": 16, "bias": "trained"},
        ],
    ),
    layer("conv1 of layer4", 2048, 1024, 25, 1),
    layer("layer1", 128, 128, 200, 3, groups=32, bias="all frozen"),
    layer(
        "layer2",
        256,
        256,
        100,
        3,
        groups=32,
        tests=[
            {**GROUPED, "added": True, "bias": "trained"},
            {**GROUPED, "relu": False, "added": True, "channels_last": False},
        ],
    ),
    layer("first of layer3", 512, 512, 50, 3, stride=2, groups=32, tests=[{**GROUPED, "groups": 4}]),
    layer("layer4", 1024, 1024, 25, 3, groups=32),
    layer("pyramid", 256, 256, 100, 3, relu=False, bias="trained"),
    layer("head", 256, 256, 100, 3, bias="trained", tests=[{**SMALL, "kernel": 3}]),
    layer("head of the coarsest level", 256, 256, 7, 3, bias="trained"),
)
