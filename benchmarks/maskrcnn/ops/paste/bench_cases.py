"""Virtual paste of a batch's detections, 100 a picture, into pictures of 480 x 640."""

from __future__ import annotations

import functools
import itertools

import torch
from torch.nn import functional

from benchmarks.maskrcnn.ops import paste
from benchmarks.maskrcnn.ops.paste.masks import Masks, Paste
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

DETECTIONS, SIZE = 100, 28
HEIGHT, WIDTH = 480, 640
SIDE = 140.0
"""Mean sides of a box, px."""

THRESHOLD = 0.5
PICTURES = 12
MOST_RUNS = 8
"""Room for ends, a column of the picture and detection: smooth masks have fewer."""


def _masks(batch: int, dtype: torch.dtype) -> Masks:
    """One blob with holes for each detection."""
    device, count = cases.DEVICE, batch * DETECTIONS
    rough = 3 * torch.randn((count, 1, 5, 5), device=device) + 1
    probability = functional.interpolate(rough, (SIZE, SIZE), mode="bilinear")[:, 0].sigmoid().to(dtype)
    corner = torch.rand((count, 2), device=device) * torch.tensor([WIDTH, HEIGHT], device=device)
    boxes = torch.cat([corner, corner + 2 * SIDE * torch.rand((count, 2), device=device)], 1)
    size = torch.tensor([HEIGHT, WIDTH], device=device).repeat(count, 1)
    return Masks(probability, boxes, size, torch.ones(count, dtype=torch.bool, device=device))


def case(function: Paste, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Counting and writing; what the host does between them is left out."""
    masks = _masks(batch, dtype)
    room = MOST_RUNS * WIDTH
    first = torch.arange(len(masks.there_D), device=cases.DEVICE) * room
    ends = torch.empty(len(masks.there_D) * room, dtype=torch.int32, device=cases.DEVICE)
    moved = float(sum(column.numel() * column.element_size() for column in masks))
    return [
        Pass("forward", lambda: function.count_runs(masks, THRESHOLD), moved),
        Pass("write", lambda: function.write_ends(masks, THRESHOLD, first, ends), moved),
    ]


def entries() -> list[Entry]:
    """The kernel. The reference runs on the CPU."""
    return each("paste", paste.PASTE, "triton", {}, case, calls=0, only=["triton"])


def sweeps() -> dict[str, Sweep]:
    """Pixels at a time and warps."""
    from benchmarks.maskrcnn.ops.paste import triton

    tiles = list(itertools.product((256, 512, 1024, 2048), (2, 4, 8)))
    build = functools.partial(case, paste.PASTE.function("triton"), PICTURES)
    return {"paste": Sweep(triton.TILES, "paste", tiles, build, False)}
