"""SSD's random crop, on the boxes alone: a pure function of a generator, for every reader.

Liu et al., arXiv:1512.02325, section 2.2, "Data augmentation", with the MLPerf reference's rule of acceptance. Boxes
and crops are corners x1, y1, x2, y2 as shares of the picture. Shapes: M boxes, C corners, X the two coordinates, T
crops that are tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.ssd300.config import Facts

WHOLE = (0.0, 0.0, 1.0, 1.0)
TRIED_AT_ONCE = 16
"""Crops that are drawn together, but always all attempts of a kind; for most pictures one of them fits."""
_WHOLE_PICTURE = 0
"""The kind that is no crop; those with a least overlap follow, and the one without is the last."""


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

    Several crops are drawn at once, of which the first that fits is taken: the readers' threads share one interpreter.

    Args:
        boxes_M4: the picture's boxes, at least one.
        facts: overlaps, scale and aspect.
        attempts: crops that are tried of a kind.
        random: source of all that is drawn.
    """
    corners_M22 = boxes_M4.reshape(-1, 2, 2)
    centre_MX = corners_M22.mean(1)
    size_MX = corners_M22[:, 1] - corners_M22[:, 0]
    area_M = size_MX[:, 0] * size_MX[:, 1]
    least_of_kind = np.array([-math.inf, *facts.crop_overlaps, -math.inf])
    while True:
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
