"""Matches of RetinaNet's anchors, in pictures with few boxes and with many."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from common.ops import anchor_matching
from common.ops.anchor_matching.reference import MatchingRule
from common.ops.bench import cases
from common.ops.bench import detection as size
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

RULE = MatchingRule(0.4, 0.5, rescue="every_best")
CROWDED = 300
"""Boxes of a picture in a batch that has many."""


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype, *, most: int) -> list[Pass]:
    """Up to ``most`` boxes in each of the pictures."""
    anchors = size.anchors()
    boxes = size.boxes(size.PICTURES, size.MOST_BOXES, side=300.0)
    count = torch.randint(1, most + 1, (size.PICTURES,), device=cases.DEVICE)
    moved = anchors.numel() * 4.0 + size.PICTURES * len(anchors) * 8.0
    return [Pass("forward", lambda: function(anchors, boxes, count, RULE), moved)]


def entries() -> list[Entry]:
    """Every implementation."""
    return [
        entry
        for name, most in (("matching", 2 * size.BOXES - 1), ("matching crowded", CROWDED))
        for entry in each(
            name, anchor_matching.ANCHOR_MATCHING, "triton", {}, functools.partial(case, most=most), calls=0
        )
    ]


def sweeps() -> dict[str, Sweep]:
    """Anchors and warps of both kernels."""
    from common.ops.anchor_matching import triton

    tiles = list(itertools.product((128, 256, 512, 1024), (1, 2, 4)))
    function = anchor_matching.ANCHOR_MATCHING.function("triton")
    build = functools.partial(case, function, size.PICTURES, most=2 * size.BOXES - 1)
    return {f"matching {key}": Sweep(triton.TILES, key, tiles, build, False) for key in triton.TILES}
