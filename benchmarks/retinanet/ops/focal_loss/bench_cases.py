"""The focal loss of all five levels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.retinanet.ops import focal_loss
from common.ops.bench import cases
from common.ops.bench import detection as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep

ALPHA, GAMMA = 0.25, 2.0
LOSS_SCALE = 65536.0
BATCHES = (32, 4)
"""Pictures of a micro-batch, at which tiles are tried."""


def _classes(batch: int) -> Tensor:
    """Classes of all anchors: every hundredth has one, every hundredth is ignored, the rest are background."""
    anchors = size.ANCHORS * sum(places * places for places in size.LEVELS)
    drawn = torch.rand((batch, anchors), device=cases.DEVICE)
    found = torch.randint(size.CLASSES, (batch, anchors), device=cases.DEVICE)
    return torch.where(drawn < 0.01, found, torch.where(drawn < 0.02, -2, -1))


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Forward does all the work; backward hands on what is stored."""
    channels = size.ANCHORS * size.CLASSES
    logits = [
        torch.randn((batch, channels, places, places), device=cases.DEVICE)
        .to(dtype)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
        for places in size.LEVELS
    ]
    bias = torch.full((channels,), -4.6, device=cases.DEVICE, dtype=dtype, requires_grad=True)
    widths = [size.ANCHORS * places * places for places in size.LEVELS]
    classes = _classes(batch).split(widths, 1)
    weight = torch.full((batch,), 0.1 / batch, device=cases.DEVICE)
    scale = torch.full((), LOSS_SCALE, device=cases.DEVICE)

    def forward() -> Tensor:
        levels = zip(logits, classes, strict=True)
        losses = [function(level, bias, own, weight, ALPHA, GAMMA, scale) for level, own in levels]
        return torch.stack(losses).sum()

    unit = float(sum(level.numel() * dtype.itemsize for level in logits))
    ids = float(sum(own.numel() * own.element_size() for own in classes))
    return both_ways(forward, [*logits, bias], [scale], moved=(2 * unit + ids, 0.0))


def entries() -> list[Entry]:
    """Every implementation."""
    return each("focal_loss", focal_loss.FOCAL_LOSS, "triton", {}, case)


def sweeps() -> dict[str, Sweep]:
    """Vectors, warps, programs and stages."""
    from benchmarks.retinanet.ops.focal_loss import triton

    shapes = ((64, 2), (128, 4), (256, 8), (256, 4), (512, 8))
    tiles = [(*shape, *rest) for shape, *rest in itertools.product(shapes, (2, 3, 4, 5, 7, 10), (1, 2, 3))]
    function = focal_loss.FOCAL_LOSS.function("triton")
    return {
        f"focal_loss n {batch}": Sweep(triton.TILES, "loss", tiles, functools.partial(case, function, batch), False)
        for batch in BATCHES
    }
