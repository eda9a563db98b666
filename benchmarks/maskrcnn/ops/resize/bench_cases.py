"""The pictures of a batch: most of COCO's are 640 x 480 px, which become 1066 x 800, padded to 1344 x 800."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.ops import resize
from benchmarks.maskrcnn.pictures import resized_size
from common.mlperf.fixed import fixed_facts
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

BATCHES = (12, 1)
"""Pictures of a micro-batch, at which tiles are tried."""
PUBLISHED = (480, 640)
SHAPE = (800, 1344)


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Every pixel of the pictures is read, and the whole batch written; every other picture is mirrored."""
    facts, device = fixed_facts(Facts, "maskrcnn"), cases.DEVICE
    side = facts.longest_side
    pixels = torch.randint(256, (batch, side, side, 3), dtype=torch.uint8, device=device)
    decoded = torch.tensor([PUBLISHED] * batch, dtype=torch.int32, device=device)
    resized = resized_size(*PUBLISHED, facts.min_size, facts.max_size)
    size = torch.tensor([resized] * batch, dtype=torch.float32, device=device)
    mirrored = torch.arange(batch, device=device) % 2 == 0
    read, written = PUBLISHED[0] * PUBLISHED[1], SHAPE[0] * SHAPE[1] * dtype.itemsize
    moved = float(3 * batch * (read + written))
    return [Pass("forward", lambda: function(pixels, decoded, size, mirrored, facts.mean, SHAPE, dtype), moved)]


def entries() -> list[Entry]:
    """Every implementation."""
    return each("resize", resize.RESIZE, "triton", {}, case)


def sweeps() -> dict[str, Sweep]:
    """Values and rows of a program, and warps."""
    from benchmarks.maskrcnn.ops.resize import triton

    tiles = list(itertools.product((256, 512, 1024), (4, 8, 16, 32), (2, 4, 8)))
    function = resize.RESIZE.function("triton")
    return {
        f"resize n {batch}": Sweep(triton.TILES, "resize", tiles, functools.partial(case, function, batch), False)
        for batch in BATCHES
    }
