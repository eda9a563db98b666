"""RoIAlign of both heads over the pyramid of 12 pictures of 800 x 1344 px."""

from __future__ import annotations

import functools
import itertools

import torch

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.ops import roi_align
from benchmarks.maskrcnn.ops.roi_align import Regions, RoiAlign
from common.mlperf.fixed import fixed_facts
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep

HEIGHT, WIDTH = 800, 1344
STRIDES = (4, 8, 16, 32)
BATCHES = (12, 4, 1)
"""Pictures of a micro-batch, at which tiles are tried."""
OBJECTS = 8
"""Of a picture; what is positive lies around them."""
MASKED = 50
"""Regions of a picture with an object, the first ones: as many of an iteration's 1,536 slots as 600."""


def regions(facts: Facts, pictures: int) -> list[Regions]:
    """Those of the box head, from all over a picture, and of the mask head, around few objects."""
    count, slots = facts.roi_sampled, facts.mask_slots
    size = torch.tensor([WIDTH, HEIGHT], device=cases.DEVICE)
    middle = torch.rand((pictures, count, 2), device=cases.DEVICE)
    share = torch.rand((pictures, count, 2), device=cases.DEVICE) ** 3 * 0.7 + 0.01
    of_object = torch.arange(slots, device=cases.DEVICE) % OBJECTS
    middle[:, :slots], share[:, :slots] = middle[:, of_object], share[:, of_object]
    jitter = 1 + 0.2 * torch.rand((pictures, count, 4), device=cases.DEVICE)
    half = share / 2
    corners = torch.cat([(middle - half) * size, (middle + half) * size], 2) * jitter
    corners = torch.minimum(corners.clamp(min=0), torch.cat([size, size]) - 1)
    slot = torch.arange(count, device=cases.DEVICE).expand(pictures, -1)
    return [
        Regions(corners, slot < count, facts.box_resolution),
        Regions(corners[:, :slots], slot[:, :slots] < MASKED, facts.mask_resolution),
    ]


def case(function: RoiAlign, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Levels are read forward, and their gradient is written; features are written, and their gradient is read."""
    facts = fixed_facts(Facts, "maskrcnn")
    channels = facts.pyramid_channels
    levels = [
        torch.randn((batch, HEIGHT // stride, WIDTH // stride, channels), device=cases.DEVICE)
        .to(dtype)
        .permute(0, 3, 1, 2)
        .requires_grad_()
        for stride in STRIDES
    ]
    sets = regions(facts, batch)
    gradients = [
        torch.full((own.there_BR.numel(), own.resolution, own.resolution, channels), 0.01, device=cases.DEVICE)
        .to(dtype)
        .permute(0, 3, 1, 2)
        for own in sets
    ]
    features = float(sum(gradient.numel() for gradient in gradients) * dtype.itemsize)
    moved = float(sum(level.numel() for level in levels) * dtype.itemsize) + features
    return both_ways(
        lambda: function.several(levels, sets, STRIDES, facts.roi_samples), levels, gradients, moved=(moved, moved)
    )


def entries() -> list[Entry]:
    """Every implementation."""
    return each("roi_align", roi_align.ROI_ALIGN, "triton", {}, case)


def sweeps() -> dict[str, Sweep]:
    """Channels and warps forward, sides of tiles too backward."""
    from benchmarks.maskrcnn.ops.roi_align import triton

    choices: dict[str, list[tuple[int, ...]]] = {
        "forward": list(itertools.product((64, 128, 256), (1, 2, 4, 8))),
        "lists": list(itertools.product((128, 256, 512), (1, 2, 4))),
        "backward": list(itertools.product((4, 8), (64, 128, 256), (16, 32, 64), (4, 8))),
    }
    function = roi_align.ROI_ALIGN.function("triton")
    return {
        f"roi_align {name} n {batch}": Sweep(
            triton.TILES, name, choices[name], functools.partial(case, function, batch), name != "forward"
        )
        for name, batch in itertools.product(choices, BATCHES)
    }
