"""SSD's random crop, on the boxes alone: a pure function of a generator, for every reader.

Liu et al., arXiv:1512.02325, section 2.2, "Data augmentation", with the MLPerf reference's rule of acceptance. Boxes
and crops are corners x1, y1, x2, y2 as shares of the picture. Shapes: M boxes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.ssd300.config import Facts

WHOLE = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Crop:
    """A part of a picture.

    Attributes:
        corners: of the part, as shares of the picture.
        kept: (M,) bool, the boxes that have their centre in it.
        boxes: (kept, 4) those boxes, cut to the part, as shares of it; float64.
    """

    corners: tuple[float, float, float, float]
    kept: NDArray[np.bool_]
    boxes: NDArray[np.float64]

    def pixels(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom in a picture of that size, px, each rounded down."""
        left, top, right, bottom = self.corners
        return int(left * width), int(top * height), int(right * width), int(bottom * height)


def random_crop(boxes_M4: NDArray[np.float64], facts: Facts, attempts: int, random: np.random.Generator) -> Crop:
    """Draw a crop.

    One kind is drawn: the whole picture, or a crop that all boxes, whole as they are, overlap by strictly more than a
    given intersection over union, or a crop without such a condition; each is as likely. Then a width and a height are
    drawn, whose ratio (of the shares, not of pixels) has to be within ``crop_aspect``, and a place. After ``attempts``
    crops that do not fit, or hold no box's centre, another kind is drawn, without end: the whole picture always fits.

    Args:
        boxes_M4: the picture's boxes, at least one.
        facts: overlaps, scale and aspect.
        attempts: crops that are tried of a kind.
        random: source of all that is drawn.
    """
    kinds = (None, *facts.crop_overlaps, -np.inf)
    while True:
        least = kinds[int(random.integers(len(kinds)))]
        if least is None:
            return Crop(WHOLE, np.ones(len(boxes_M4), np.bool_), boxes_M4)
        for _ in range(attempts):
            width, height = random.uniform(*facts.crop_scale, 2)
            if not facts.crop_aspect[0] <= width / height <= facts.crop_aspect[1]:
                continue
            left, top = random.uniform(0, 1 - width), random.uniform(0, 1 - height)
            crop_4 = np.array([left, top, left + width, top + height])
            if not np.all(_overlaps(boxes_M4, crop_4) > least):
                continue
            centre_M2 = (boxes_M4[:, :2] + boxes_M4[:, 2:]) / 2
            kept_M = np.all((centre_M2 > crop_4[:2]) & (centre_M2 < crop_4[2:]), axis=1)
            if kept_M.any():
                inside_M4 = np.clip(boxes_M4[kept_M], np.tile(crop_4[:2], 2), np.tile(crop_4[2:], 2))
                shares_M4 = (inside_M4 - np.tile(crop_4[:2], 2)) / np.tile([width, height], 2)
                return Crop((left, top, left + width, top + height), kept_M, shares_M4)


def _overlaps(boxes_M4: NDArray[np.float64], crop_4: NDArray[np.float64]) -> NDArray[np.float64]:
    """Intersection over union of each box with the crop; 0 without an intersection."""
    sides_M2 = np.minimum(boxes_M4[:, 2:], crop_4[2:]) - np.maximum(boxes_M4[:, :2], crop_4[:2])
    both_M = sides_M2.clip(min=0).prod(axis=1)
    area_M = (boxes_M4[:, 2:] - boxes_M4[:, :2]).prod(axis=1)
    overlaps: NDArray[np.float64] = both_M / (area_M + (crop_4[2:] - crop_4[:2]).prod() - both_M)
    return overlaps
