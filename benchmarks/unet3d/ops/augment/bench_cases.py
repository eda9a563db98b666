"""Making training crops. A step waits for none of it, so that it adds nothing to the sum of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.unet3d.crop import NOISE_DEVIATION, Crop, Draws, Slab
from benchmarks.unet3d.ops import augment
from benchmarks.unet3d.ops.augment.reference import parameters
from benchmarks.unet3d.ops.bench_layers import FACTS, SIZE
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep


def case(function: Callable[..., Any], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Crops of one volume of fp32 each, all mirrored along W, as many with noise as the rules have on average."""
    slab = Slab((SIZE, SIZE, SIZE), 0, SIZE)
    noisy = round(FACTS.noise_probability * batch)
    crops = [
        Crop(number * slab.voxels, slab.size, (0, 0, 0), Draws((False, False, True), 1.0, deviation, number))
        for number, deviation in enumerate([NOISE_DEVIATION] * noisy + [0.0] * (batch - noisy))
    ]
    images = torch.empty(batch * slab.voxels, device=cases.DEVICE).normal_()
    labels = torch.randint(FACTS.classes, images.shape, device=cases.DEVICE, dtype=torch.uint8)
    given = [tensor.to(cases.DEVICE) for tensor in parameters(crops, slab).values()]
    moved = images.numel() * (images.element_size() + dtype.itemsize + 2.0)
    return [Pass("forward", lambda: function(images, labels, *given, slab, dtype), moved)]


def entries() -> list[Entry]:
    """Every implementation."""
    return each("augmentation", augment.AUGMENT, "triton", {}, case, calls=0)


def sweeps() -> dict[str, Sweep]:
    """The kernel has no table of tiles."""
    return {}
