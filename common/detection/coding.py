"""Coding of boxes as offsets from anchors, and back. Boxes are corners x1, y1, x2, y2. Shapes: A anchors.

Girshick et al., arXiv:1311.2524, appendix C: relative to an anchor with centre (ax, ay) and size (aw, ah), a box (x,
y, w, h) is ``((x - ax) / aw, (y - ay) / ah, ln(w / aw), ln(h / ah))``, each times a weight. All arithmetic is in
fp32, or in fp64 for fp64 inputs. For ``pixel`` see :mod:`common.ops.boxes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.ops.boxes import side
from common.ops.triton_support import widen


@dataclass(frozen=True)
class BoxCoding:
    """Options of the coding.

    Attributes:
        weights: weights of x, y, width and height. SSD's variances 0.1 and 0.2 are weights of 10 and 5.
        most_growth: largest ratio of a decoded box's width or height to the anchor's; None sets no limit.
        pixel: number added to x2 - x1 and y2 - y1 to get width and height; a centre is half a side from (x1, y1).
    """

    weights: tuple[float, float, float, float]
    most_growth: float | None = None
    pixel: float = 0.0

    def encode(self, boxes_A4: Tensor, anchors_A4: Tensor) -> Tensor:
        """Return the offsets, (..., A, 4), of ``boxes_A4``, (..., A, 4), from ``anchors_A4``, which broadcast.

        A box without width or height has an infinite offset. Exclude it with ``where``: a product with 0 would be NaN.
        """
        (x, y, width, height), (anchor_x, anchor_y, anchor_width, anchor_height) = (
            _centres(widen(boxes), self.pixel) for boxes in (boxes_A4, anchors_A4)
        )
        weight_x, weight_y, weight_width, weight_height = self.weights
        return torch.stack(
            [
                weight_x * (x - anchor_x) / anchor_width,
                weight_y * (y - anchor_y) / anchor_height,
                weight_width * torch.log(width / anchor_width),
                weight_height * torch.log(height / anchor_height),
            ],
            -1,
        )

    def decode(self, offsets_A4: Tensor, anchors_A4: Tensor) -> Tensor:
        """Return the boxes, (..., A, 4), of ``offsets_A4``, (..., A, 4), from ``anchors_A4``, which broadcast."""
        anchor_x, anchor_y, anchor_width, anchor_height = _centres(widen(anchors_A4), self.pixel)
        dx, dy, dw, dh = (
            offset / weight for offset, weight in zip(widen(offsets_A4).unbind(-1), self.weights, strict=True)
        )
        if self.most_growth is not None:
            most = math.log(self.most_growth)
            dw, dh = dw.clamp(max=most), dh.clamp(max=most)
        x, y = dx * anchor_width + anchor_x, dy * anchor_height + anchor_y
        half_width, half_height = 0.5 * (torch.exp(dw) * anchor_width), 0.5 * (torch.exp(dh) * anchor_height)
        x2, y2 = x + half_width, y + half_height
        if self.pixel:
            x2, y2 = x2 - self.pixel, y2 - self.pixel
        return torch.stack([x - half_width, y - half_height, x2, y2], -1)


def clip(boxes_A4: Tensor, height: float | Tensor, width: float | Tensor, pixel: float = 0.0) -> Tensor:
    """Return boxes, (..., A, 4), clipped to their pictures.

    Args:
        height, width: size of the pictures, px, which broadcasts against (..., A).
        pixel: number subtracted from the sizes to get the largest coordinate; see :mod:`common.ops.boxes`.
    """
    if pixel:
        height, width = height - pixel, width - pixel
    x1, y1, x2, y2 = boxes_A4.clamp(min=0).unbind(-1)
    return torch.stack([_at_most(x1, width), _at_most(y1, height), _at_most(x2, width), _at_most(y2, height)], -1)


def rows_of(values_BAX: Tensor, row_BC: Tensor) -> Tensor:
    """Return the rows (B, C, X) of ``values_BAX``, (B, A, X), with the indices ``row_BC``, (B, C)."""
    return values_BAX.gather(1, row_BC.unsqueeze(2).expand(-1, -1, values_BAX.shape[2]))


def _at_most(values: Tensor, limit: float | Tensor) -> Tensor:
    return torch.minimum(values, limit) if isinstance(limit, Tensor) else values.clamp(max=limit)


def _centres(boxes_A4: Tensor, pixel: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x1, y1, x2, y2 = boxes_A4.unbind(-1)
    width, height = side(x1, x2, pixel), side(y1, y2, pixel)
    return x1 + 0.5 * width, y1 + 0.5 * height, width, height
