"""Augmentation of a training picture. It is drawn without the pixels, so that all readers augment alike.

Crop, mirror, resize and colour changes are those of the MLPerf reference, which calls torchvision's transforms on
Pillow pictures. In training and evaluation, bilinear resizing is antialiased if it shrinks. Shapes: M boxes, H x W
pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import functional as transforms

from benchmarks.ssd300.config import Facts
from benchmarks.ssd300.crop import Crop, random_crop

Change = Literal["brightness", "contrast", "saturation", "hue"]
CHANGES: tuple[Change, ...] = ("brightness", "contrast", "saturation", "hue")


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of one picture.

    Attributes:
        flip: mirror left to right.
        boxes: (M, 4) boxes of the result, corners as fractions of it.
        colours: changes and their amounts, in order. An amount is a factor, or for hue a fraction of the colour
            circle.
    """

    crop: Crop
    flip: bool
    boxes: NDArray[np.float64]
    colours: tuple[tuple[Change, float], ...]

    def amount(self, change: Change) -> float:
        """Return the amount of a change."""
        return dict(self.colours)[change]


def draw(boxes_M4: NDArray[np.float64], facts: Facts, attempts: int, random: np.random.Generator) -> Augmentation:
    """Draw the augmentation of a picture. See :func:`benchmarks.ssd300.crop.random_crop` for the arguments."""
    crop = random_crop(boxes_M4, facts, attempts, random)
    flip = bool(random.random() < facts.mirror)
    boxes = crop.boxes
    if flip:
        boxes = np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], axis=1)
    order = random.permutation(len(CHANGES))
    amounts = {
        "brightness": random.uniform(1 - facts.brightness, 1 + facts.brightness),
        "contrast": random.uniform(1 - facts.contrast, 1 + facts.contrast),
        "saturation": random.uniform(1 - facts.saturation, 1 + facts.saturation),
        "hue": random.uniform(-facts.hue, facts.hue),
    }
    return Augmentation(crop, flip, boxes, tuple((CHANGES[place], amounts[CHANGES[place]]) for place in order))


def train_pixels(picture: Image.Image, plan: Augmentation, side: int) -> NDArray[np.uint8]:
    """Crop, resize, change colours and mirror; return pixels (side, side, 3)."""
    part = picture.crop(plan.crop.pixels(*picture.size)).resize((side, side), Image.Resampling.BILINEAR)
    for change, amount in plan.colours:
        part = _CHANGED[change](part, amount)
    pixels_HWC = np.asarray(part)
    return pixels_HWC[:, ::-1] if plan.flip else pixels_HWC


def eval_pixels(picture: Image.Image, side: int) -> NDArray[np.uint8]:
    """Resize; return pixels (side, side, 3)."""
    return np.asarray(picture.resize((side, side), Image.Resampling.BILINEAR))


_CHANGED = {
    "brightness": transforms.adjust_brightness,
    "contrast": transforms.adjust_contrast,
    "saturation": transforms.adjust_saturation,
    "hue": transforms.adjust_hue,
}
