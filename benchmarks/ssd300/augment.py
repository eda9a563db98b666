"""What happens to a training picture: drawn apart from its pixels, so that every reader does the same with it.

Crop, mirror, resize, change of colour: the MLPerf reference's, which calls torchvision's transforms of Pillow's
pictures. Their bilinear resize is antialiased where it shrinks, in training and in evaluation. Shapes: M boxes, H x W
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
    """What is done with one picture.

    Attributes:
        crop: the part of it that is taken.
        flip: whether it is mirrored, left for right.
        boxes: (M, 4) boxes of the result, corners as shares of it; float64.
        colours: each change and its amount, in the order in which they are made: a factor, but the share of the
            circle by which hues turn.
    """

    crop: Crop
    flip: bool
    boxes: NDArray[np.float64]
    colours: tuple[tuple[Change, float], ...]

    def amount(self, change: Change) -> float:
        """The amount of a change."""
        return dict(self.colours)[change]


def draw(boxes_M4: NDArray[np.float64], facts: Facts, attempts: int, random: np.random.Generator) -> Augmentation:
    """Draw what is done with a picture that has ``boxes_M4``, corners as shares of it; ``attempts`` as for the crop."""
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
    """Crop, resize, change colours, mirror: (side, side, 3)."""
    part = picture.crop(plan.crop.pixels(*picture.size)).resize((side, side), Image.Resampling.BILINEAR)
    for change, amount in plan.colours:
        part = _CHANGED[change](part, amount)
    pixels_HWC = np.asarray(part)
    return pixels_HWC[:, ::-1] if plan.flip else pixels_HWC


def eval_pixels(picture: Image.Image, side: int) -> NDArray[np.uint8]:
    """Resize: (side, side, 3)."""
    return np.asarray(picture.resize((side, side), Image.Resampling.BILINEAR))


_CHANGED = {
    "brightness": transforms.adjust_brightness,
    "contrast": transforms.adjust_contrast,
    "saturation": transforms.adjust_saturation,
    "hue": transforms.adjust_hue,
}
