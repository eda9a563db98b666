"""Default boxes, in two orders, and their targets, computed on the device with fixed shapes and without waiting for it.

Liu et al., arXiv:1512.02325, section 2.2, with the numbers of the MLPerf reference. A kind is one of the shapes in a
cell. The reference views a head's output (N, kinds * 4, H, W) as (N, 4, kinds * H * W); its order is therefore (level,
kind, cell). Our heads' outputs are in channels_last memory, with kinds before coordinates, so that the order is
(level, cell, kind) and nothing has to be moved. ``reference_rows`` maps one order to the other.

Shapes: B pictures, A default boxes in the heads' order, M boxes at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.ssd300.config import Facts
from common.detection.coding import BoxCoding, rows_of
from common.ops.anchor_matching import ANCHOR_MATCHING, MatchingRule
from common.ops.operation import OperationRequest, select


def reference_boxes(facts: Facts) -> Tensor:
    """Return the default boxes in the reference's order: (A, 4) fp32 corners x1, y1, x2, y2 as fractions.

    Centres and sizes are clamped to 0 ... 1. Corners are not clamped and can be outside the picture.
    """
    rows = [
        (x, y, width, height)
        for level, cells in enumerate(facts.level_sizes)
        for width, height in _kinds(facts, level)
        for y, x in _centres(facts, level, cells)
    ]
    x_A, y_A, width_A, height_A = torch.tensor(rows, dtype=torch.float64).float().clamp(0, 1).unbind(1)
    return torch.stack(
        [x_A - 0.5 * width_A, y_A - 0.5 * height_A, x_A + 0.5 * width_A, y_A + 0.5 * height_A],
        1,
    )


def reference_rows(facts: Facts) -> Tensor:
    """Return (A,) int64: the row in the reference's order of each default box in the heads' order."""
    levels, first = [], 0
    for cells, kinds in zip(facts.level_sizes, facts.boxes_per_cell, strict=True):
        count = kinds * cells * cells
        levels.append(first + torch.arange(count).view(kinds, cells * cells).T.reshape(-1))
        first += count
    return torch.cat(levels)


def coding(facts: Facts) -> BoxCoding:
    """Return the coding of boxes relative to default boxes, without a limit for the size of decoded boxes."""
    centre, size = facts.deviations
    return BoxCoding((1 / centre, 1 / centre, 1 / size, 1 / size))


def _kinds(facts: Facts, level: int) -> Iterator[tuple[float, float]]:
    """Yield width and height of each kind of default box of a level."""
    size, next_size = (facts.box_sizes[level + step] / facts.image_size for step in (0, 1))
    yield size, size
    between = math.sqrt(size * next_size)
    yield between, between
    for ratio in facts.aspect_ratios[level]:
        longer, shorter = size * math.sqrt(ratio), size / math.sqrt(ratio)
        yield longer, shorter
        yield shorter, longer


def _centres(facts: Facts, level: int, cells: int) -> Iterator[tuple[float, float]]:
    """Yield y and x of each cell's centre, row by row."""
    across = facts.image_size / facts.steps[level]
    for row in range(cells):
        for column in range(cells):
            yield (row + 0.5) / across, (column + 0.5) / across


BACKGROUND = 0
"""Class of a default box without a matched box. Object classes start at 1."""


class Targets:
    """Matches boxes to default boxes and encodes them.

    A default box is matched to the box with the largest overlap, if that is above ``match_overlap``. In addition, each
    box gets the default box with the largest overlap; if several boxes want the same one, the last gets it (Liu et
    al., arXiv:1512.02325, section 2.2, and the MLPerf reference). A box without area is never matched.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(self, facts: Facts, implementations: Mapping[str, str], device: torch.device) -> None:
        request = OperationRequest(device, torch.float32, {"anchors": len(reference_rows(facts))})
        self.choice, self._match = select(implementations, "anchor_matching", ANCHOR_MATCHING, request)
        overlap = facts.match_overlap
        self._rule = MatchingRule(overlap, overlap, exclusive=True, rescue="own_best")
        self._coding = coding(facts)
        self._rows_A = reference_rows(facts).to(device)
        # Matching uses the reference's order, so that the same default box is the first of equal overlaps.
        self._reference_A4 = reference_boxes(facts).to(device)
        self._boxes_A4 = self._reference_A4[self._rows_A]

    @torch.no_grad()
    def __call__(self, boxes_BM4: Tensor, label_BM: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets of a batch.

        Args:
            boxes_BM4: corners as fractions of the picture, followed by padding of any value; fp32.
            label_BM: classes from 1; int64.
            count_B: number of boxes of each picture; int64.

        Returns:
            (B, A) int64 class of each default box, 0 for background; (B, A, 4) fp32 offsets of its box, 0 for
            background.
        """
        matched_BA = self._match(self._reference_A4, boxes_BM4, count_B, self._rule)[:, self._rows_A]
        object_BA = matched_BA >= 0
        row_BA = matched_BA.clamp(min=0)
        class_BA = torch.where(object_BA, label_BM.gather(1, row_BA), BACKGROUND)
        found_BA4 = rows_of(boxes_BM4, row_BA)
        # Background is encoded as the default box itself, because the logarithm of padding may not exist.
        found_BA4 = torch.where(object_BA.unsqueeze(2), found_BA4, self._boxes_A4)
        offsets_BA4 = self._coding.encode(found_BA4, self._boxes_A4)
        return class_BA, torch.where(object_BA.unsqueeze(2), offsets_BA4, 0.0)
