"""Cases of the augmentation: crops from different volumes, with all combinations of flips, some of them with noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.unet3d.crop import NOISE_DEVIATION, CropDraws, Size3, Slab, VolumeCrop
from benchmarks.unet3d.ops.augment import parameters
from benchmarks.unet3d.ops.sizes import FACTS, SAMPLES
from common.ops.cases import Case, Draw, Pass, size_of

LARGEST_SEED = 2**63 - 1


def passes(
    function: Callable[..., Any],
    draw: Draw,
    samples: int,
    volume: Size3,
    size: Size3,
    noisy: int,
    brightness: float,
    planes: int,
    first_plane: int = 0,
) -> list[Pass]:
    """Return the forward pass. Each crop has a different position in its volume.

    Args:
        volume: (D, H, W) of every volume.
        size: (D, H, W) of every crop.
        noisy: number of crops with noise, which come first.
        brightness: increase of the intensity factor from crop to crop; the first crop has factor 1.
        planes: number of planes of the slab.
        first_plane: index of the first plane of the slab.
    """
    slab = Slab(size, first_plane, planes)
    voxels = volume[0] * volume[1] * volume[2]
    crops = []
    for number in range(samples):
        origin = [(number * (3 + axis)) % (volume[axis] - size[axis] + 1) for axis in range(3)]
        flips = bool(number & 4), bool(number & 2), not number & 1
        deviation = NOISE_DEVIATION if number < noisy else 0.0
        draws = CropDraws(flips, 1 + brightness * number, deviation, LARGEST_SEED >> 9 * number)
        crops.append(VolumeCrop(number * voxels, volume, (origin[0], origin[1], origin[2]), draws))
    images = draw.normal(samples * voxels, dtype=torch.float32)
    labels = draw.integers(0, FACTS.classes, samples * voxels, dtype=torch.uint8)
    given = [tensor.to(draw.device) for tensor in parameters(crops, slab).values()]

    def forward() -> Any:
        image, label = function(images, labels, *given, slab, draw.dtype)
        return image, image.stride(), label

    made = samples * slab.voxels
    return [Pass("forward", forward, made * (images.element_size() + draw.dtype.itemsize) + 2 * size_of(labels[:made]))]


RECIPE = {
    "samples": SAMPLES,
    "volume": FACTS.input_shape,
    "size": FACTS.input_shape,
    "noisy": round(FACTS.noise_probability * SAMPLES),
    "brightness": 0.0,
    "planes": FACTS.input_shape[0],
}
SMALL = {"samples": 8, "volume": (19, 25, 31), "size": (8, 13, 11), "planes": 8}
LARGE = {"samples": 8, "volume": (150, 161, 143)}

CASES = (
    Case(
        "3D U-Net",
        passes,
        RECIPE,
        tests=[
            {**SMALL, "noisy": 8, "brightness": 0.1},
            {**SMALL, "noisy": 3, "planes": 2, "first_plane": 2},
        ],
        gpu={**LARGE, "noisy": 5, "brightness": 0.1},
        fp64=False,
    ),
    Case(
        "3D U-Net without noise",
        passes,
        {**RECIPE, "noisy": 0},
        tests=[
            {**SMALL, "brightness": 0.1},
            {**SMALL, "planes": 3, "first_plane": 2},
        ],
        gpu={**LARGE, "brightness": 0.1, "planes": 16, "first_plane": 48},
        exact=True,
    ),
)
