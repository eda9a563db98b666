"""Augmentation of a training picture. It is drawn without the pixels, so that all readers augment alike.

Crop, mirror, resize and colour changes are those of the MLPerf reference, which calls torchvision's transforms on
Pillow pictures. The crop is that of Liu et al., arXiv:1512.02325, section 2.2, "Data augmentation", with the
acceptance rule of the reference. In training and evaluation, bilinear resizing is antialiased if it shrinks.

Boxes and crops are corners x1, y1, x2, y2 as fractions of the picture. Shapes: M boxes, C corners, X the two
coordinates, T attempted crops, H x W pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import functional as transforms

from benchmarks.ssd300.config import Facts

WHOLE = (0.0, 0.0, 1.0, 1.0)
TRIED_AT_ONCE = 16
"""Number of crops that are drawn together, but at least all attempts of a kind. For most pictures, one fits."""
_WHOLE_PICTURE = 0
"""Kind 0: the whole picture. Then come the kinds with a minimum overlap, and last the kind without."""


@dataclass(frozen=True)
class Crop:
    """A part of a picture.

    Attributes:
        corners: corners of the part, as fractions of the picture.
        kept: (M,) bool, true for boxes whose centre is in the part.
        boxes: (kept, 4) these boxes, clipped to the part, as fractions of it.
    """

    corners: tuple[float, float, float, float]
    kept: NDArray[np.bool_]
    boxes: NDArray[np.float64]

    def pixels(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return left, top, right and bottom in px, each rounded down, for a picture of the given size."""
        left, top, right, bottom = self.corners
        return int(left * width), int(top * height), int(right * width), int(bottom * height)


def random_crop(boxes_M4: NDArray[np.float64], facts: Facts, attempts: int, random: np.random.Generator) -> Crop:
    """Draw a crop.

    First, a kind is drawn: the whole picture, a crop that every (unclipped) box overlaps by more than a given
    intersection over union, or a crop without such a condition; all are equally likely. Then a width and height are
    drawn, whose ratio (of fractions, not pixels) must be within ``crop_aspect``, and a position. After ``attempts``
    crops that do not fit or have no centre of a box, another kind is drawn, until a crop fits. The whole picture
    always fits.

    Args:
        boxes_M4: boxes of the picture, at least one.
        attempts: attempts per kind.
    """
    corners_M22 = boxes_M4.reshape(-1, 2, 2)
    centre_MX = corners_M22.mean(1)
    size_MX = corners_M22[:, 1] - corners_M22[:, 0]
    area_M = size_MX[:, 0] * size_MX[:, 1]
    least_of_kind = np.array([-math.inf, *facts.crop_overlaps, -math.inf])
    while True:
        # Several crops are drawn at once, and the first that fits is used: with one crop per iteration, Python would
        # take more time, and the readers' threads share one interpreter.
        kind_T = random.integers(len(least_of_kind), size=max(1, TRIED_AT_ONCE // attempts)).repeat(attempts)
        size_TX = random.uniform(*facts.crop_scale, (len(kind_T), 2))
        start_TX = random.random((len(kind_T), 2)) * (1 - size_TX)
        end_TX = start_TX + size_TX
        ratio_T = size_TX[:, 0] / size_TX[:, 1]

        both_TMX = np.minimum(corners_M22[:, 1], end_TX[:, None]) - np.maximum(corners_M22[:, 0], start_TX[:, None])
        np.maximum(both_TMX, 0, out=both_TMX)
        both_TM = both_TMX[:, :, 0] * both_TMX[:, :, 1]
        union_TM = area_M + (size_TX[:, 0] * size_TX[:, 1])[:, None] - both_TM
        kept_TM = ((centre_MX > start_TX[:, None]) & (centre_MX < end_TX[:, None])).all(2)
        fits_T = (both_TM > least_of_kind[kind_T][:, None] * union_TM).all(1) & kept_TM.any(1)
        fits_T &= (ratio_T >= facts.crop_aspect[0]) & (ratio_T <= facts.crop_aspect[1])
        fits_T |= kind_T == _WHOLE_PICTURE

        first = int(fits_T.argmax())
        if not fits_T[first]:
            continue
        if kind_T[first] == _WHOLE_PICTURE:
            return Crop(WHOLE, np.ones(len(boxes_M4), np.bool_), boxes_M4)
        start_X, end_X, kept_M = start_TX[first], end_TX[first], kept_TM[first]
        inside_MCX = np.minimum(np.maximum(corners_M22[kept_M], start_X), end_X)
        shares_M4 = ((inside_MCX - start_X) / size_TX[first]).reshape(-1, 4)
        (left, top), (right, bottom) = start_X.tolist(), end_X.tolist()
        return Crop((left, top, right, bottom), kept_M, shares_M4)


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
    """Draw the augmentation of a picture. See :func:`random_crop` for the arguments."""
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
    return Augmentation(crop, flip, boxes, tuple((CHANGES[index], amounts[CHANGES[index]]) for index in order))


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
