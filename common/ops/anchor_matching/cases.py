"""Cases of matching RetinaNet's anchors to boxes, for pictures with few boxes and with many."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.ops.anchor_matching import MatchingRule
from common.ops.cases import Case, Draw, Pass
from common.ops.sizes import detection as size

RETINANET = MatchingRule(0.4, 0.5, rescue="every_best")
SSD = MatchingRule(0.5, 0.5, exclusive=True, rescue="own_best")
SAMPLED = MatchingRule(0.5, 0.5)
PROPOSALS = MatchingRule(0.3, 0.7, rescue="every_best", pixel=1.0)


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    pictures: int,
    levels: Sequence[int],
    boxes: int,
    most: int,
    rule: MatchingRule,
    copies: bool = False,
    own: bool = False,
) -> list[Pass]:
    """Make the pass, which reads the anchors and writes the matches of all pictures.

    Args:
        boxes: capacity for boxes per picture, a multiple of 8. Half of the boxes are near an anchor; some are equal.
        most: largest number of boxes in a picture. The first picture has this number, the second has none.
        copies: whether each anchor occurs twice; the two copies are far apart in memory.
        own: whether each picture has its own anchors.
    """
    anchors = draw.rounded(size.anchors(levels, draw.device))
    squares = anchors[3 :: size.ANCHORS]  # the corners of these anchors are integers
    if copies:
        anchors = torch.cat([anchors, anchors.flip(0)])
    wanted = size.boxes(draw, pictures, boxes, side=300.0)
    near = anchors[draw.integers(0, len(anchors), pictures, boxes // 2)]
    wanted[:, 1::2] = near + draw.uniform(*near.shape, high=16.0)
    wanted[:, 3::4] = wanted[:, 1::4]
    wanted[:, 5::8] = near[:, 2::4]
    halves = squares[draw.integers(0, len(squares), pictures, boxes // 8)]
    halves[..., 3] = (halves[..., 1] + halves[..., 3]) / 2  # overlaps of exactly 0.5
    wanted[:, 7::8] = halves
    wanted[0, 0] = 5000 + wanted[0, 0]  # overlaps no anchor
    wanted[0, 2, 2] = wanted[0, 2, 0]  # has no area
    count = draw.integers(1, most + 1, pictures)
    count[:2] = torch.tensor([most, 0], device=draw.device)[:pictures]
    wanted[torch.arange(boxes, device=draw.device) >= count.unsqueeze(1)] = torch.nan
    if own:
        anchors = torch.stack([anchors.roll(picture, 0) for picture in range(pictures)])
    moved = 4.0 * anchors.numel() + 8.0 * pictures * anchors.shape[-2]
    return [Pass("forward", lambda: function(anchors, wanted, count, rule), moved)]


SIZES = {"pictures": size.PICTURES, "levels": size.LEVELS, "boxes": size.MOST_BOXES, "rule": RETINANET}
SMALL = {"pictures": 3, "levels": (6, 3), "boxes": 8, "most": 8}
"""Sizes with 405 anchors. With ``copies`` there are twice as many, for several programs of both kernels."""

CASES = (
    Case(
        "RetinaNet",
        passes,
        {**SIZES, "most": 2 * size.BOXES - 1},
        tests=[
            {**SMALL, "copies": True},
            {**SMALL, "rule": SSD, "copies": True},
            {**SMALL, "rule": SAMPLED},
            {**SMALL, "rule": PROPOSALS, "own": True},
            {**SMALL, "rule": MatchingRule(0.0, 0.0), "levels": (3,)},
        ],
        gpu={"pictures": 4, "rule": SSD},
        dtypes=(torch.float16, torch.float32),
        exact=True,
    ),
    Case(
        "RetinaNet, crowded",
        passes,
        {**SIZES, "most": 300},
        gpu={"pictures": 4, "copies": True},
        dtypes=(torch.float16, torch.float32),
        exact=True,
    ),
)
