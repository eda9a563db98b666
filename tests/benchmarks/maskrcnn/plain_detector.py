"""Boxes, matching, suppression, proposals and samples as lists, picture by picture, in Python's float64.

Oracle of the fixed-shape versions, without shared code. A box is a list of corners x1, y1, x2, y2 in px. Its last
pixel belongs to it, so that a side is the difference plus 1. Nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Box = Sequence[float]

BELOW, BETWEEN = -1, -2
MOST_GROWTH = 1000 / 16
RPN_STREAM, ROI_STREAM = 1, 2
"""Random streams of the keys of anchors and of proposals."""

# Boxes


def sides(box: Box, pixel: float = 1.0) -> tuple[float, float]:
    return box[2] - box[0] + pixel, box[3] - box[1] + pixel


def overlap(box: Box, other: Box, pixel: float = 1.0) -> float:
    """Intersection over union."""
    common = [max(box[0], other[0]), max(box[1], other[1]), min(box[2], other[2]), min(box[3], other[3])]
    width, height = (max(side, 0.0) for side in sides(common, pixel))
    areas = [first * second for first, second in (sides(box, pixel), sides(other, pixel))]
    return width * height / (sum(areas) - width * height) if width * height > 0 else 0.0


def encode(box: Box, anchor: Box, weights: Sequence[float] = (1, 1, 1, 1), pixel: float = 1.0) -> list[float]:
    (width, height), (anchor_width, anchor_height) = sides(box, pixel), sides(anchor, pixel)
    x, y = box[0] + width / 2, box[1] + height / 2
    anchor_x, anchor_y = anchor[0] + anchor_width / 2, anchor[1] + anchor_height / 2
    return [
        weights[0] * (x - anchor_x) / anchor_width,
        weights[1] * (y - anchor_y) / anchor_height,
        weights[2] * math.log(width / anchor_width),
        weights[3] * math.log(height / anchor_height),
    ]


def decode(
    offsets: Sequence[float], anchor: Box, weights: Sequence[float] = (1, 1, 1, 1), pixel: float = 1.0
) -> list[float]:
    anchor_width, anchor_height = sides(anchor, pixel)
    dx, dy, dw, dh = (offset / weight for offset, weight in zip(offsets, weights, strict=True))
    width, height = (
        math.exp(min(growth, math.log(MOST_GROWTH))) * side
        for growth, side in ((dw, anchor_width), (dh, anchor_height))
    )
    x = anchor[0] + anchor_width / 2 + dx * anchor_width
    y = anchor[1] + anchor_height / 2 + dy * anchor_height
    return [x - width / 2, y - height / 2, x + width / 2 - pixel, y + height / 2 - pixel]


def clip(box: Box, height: float, width: float) -> list[float]:
    limits = (width - 1, height - 1, width - 1, height - 1)
    return [min(max(corner, 0.0), limit) for corner, limit in zip(box, limits, strict=True)]


# Matching


def match(
    anchors: Sequence[Box], boxes: Sequence[Box], low: float, high: float, rescue: bool, pixel: float = 1.0
) -> list[int]:
    """For each anchor its box, BELOW or BETWEEN; with ``rescue`` a box's best anchors have what they overlap most."""
    if not boxes:
        return [BELOW] * len(anchors)
    table = [[overlap(anchor, box, pixel) for box in boxes] for anchor in anchors]
    found = []
    for row in table:
        best = max(row)
        found.append(row.index(best) if best >= high else BELOW if best < low else BETWEEN)
    if rescue:
        for box in range(len(boxes)):
            best = max(row[box] for row in table)
            for anchor, row in enumerate(table):
                if best > 0 and row[box] == best:
                    found[anchor] = row.index(max(row))
    return found


# Suppression


def suppress(boxes: Sequence[Box], threshold: float, pixel: float = 1.0) -> list[int]:
    """Return the indices of the boxes that are kept; all are of one class, the best first."""
    kept: list[int] = []
    for index, box in enumerate(boxes):
        if all(overlap(boxes[better], box, pixel) <= threshold for better in kept):
            kept.append(index)
    return kept


# Sampling


def key(seed: int, stream: int, index: int) -> int:
    """The hash that :mod:`common.ops.random_bits` describes, of Python's integers."""
    mask = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & mask
        x = (x ^ (x >> 15)) * 0x846CA68B & mask
        return x ^ (x >> 16)

    first = mix((seed & mask) ^ mix((stream * 0x9E3779B9 + 1) & mask))
    second = mix((((seed >> 32) & mask) + mix(first ^ stream)) & mask)
    return mix(mix(index ^ first) ^ second)


def sample(
    positive: Sequence[int], negative: Sequence[int], count: int, most_positive: int, key_of: Callable[[int], int]
) -> tuple[list[int], list[int]]:
    """Positives and negatives that are taken, each by their keys."""
    taken = sorted(positive, key=key_of)[:most_positive]
    return taken, sorted(negative, key=key_of)[: count - len(taken)]


# Proposals


@dataclass
class Region:
    """A proposal.

    Attributes:
        box: corners.
        logit: of an object.
        slot: the one that it has among its picture's at fixed shapes, which its random key depends on.
    """

    box: list[float]
    logit: float
    slot: int


def propose(
    levels: Sequence[tuple[Sequence[float], Sequence[Sequence[float]]]],
    anchors: Sequence[Sequence[Box]],
    height: float,
    width: float,
    candidates: int,
    threshold: float,
) -> list[Region]:
    """A picture's proposals of all levels, by level, the better first.

    Args:
        levels: logits and offsets of each level's anchors.
        anchors: of each level.
        height, width: of the picture, px.
        candidates: of a level.
        threshold: of the suppression.
    """
    found, start = [], 0
    for (logits, offsets), level_anchors in zip(levels, anchors, strict=True):
        order = sorted(range(len(logits)), key=lambda index: (-logits[index], index))[:candidates]
        boxes = [clip(decode(offsets[index], level_anchors[index]), height, width) for index in order]
        kept = suppress(boxes, threshold)
        found += [Region(boxes[one], logits[order[one]], start + slot) for slot, one in enumerate(kept)]
        start += len(order)
    return found


def best_of_picture(regions: Sequence[Region], most: int) -> list[Region]:
    """The best, whose slots are then their ranks."""
    ranked = sorted(regions, key=lambda region: (-region.logit, region.slot))[:most]
    return [Region(region.box, region.logit, slot) for slot, region in enumerate(ranked)]


def best_of_batch(pictures: Sequence[Sequence[Region]], most: int) -> list[list[Region]]:
    """Return the regions of each picture that are among the best of all pictures."""
    ranked = [(-region.logit, picture, region.slot) for picture, of in enumerate(pictures) for region in of]
    chosen = {index[1:] for index in sorted(ranked)[:most]}
    return [[region for region in of if (picture, region.slot) in chosen] for picture, of in enumerate(pictures)]


# Targets


@dataclass
class RpnTarget:
    """Targets of the region proposal network for a picture.

    Attributes:
        positive, negative: anchors.
        offsets: of the positives' boxes.
    """

    positive: list[int]
    negative: list[int]
    offsets: list[list[float]]


def rpn_target(
    anchors: Sequence[Box],
    boxes: Sequence[Box],
    height: float,
    width: float,
    low: float,
    high: float,
    count: int,
    most_positive: int,
    key_of: Callable[[int], int],
) -> RpnTarget:
    """Ren et al., arXiv:1506.01497, section 3.1.2; anchors across the picture's border are left out of the sample."""
    found = match(anchors, boxes, low, high, rescue=True)
    inside = [
        index for index, box in enumerate(anchors) if box[0] >= 0 and box[1] >= 0 and box[2] < width and box[3] < height
    ]
    positive, negative = sample(
        [index for index in inside if found[index] >= 0],
        [index for index in inside if found[index] == BELOW],
        count,
        most_positive,
        key_of,
    )
    return RpnTarget(positive, negative, [encode(boxes[found[index]], anchors[index]) for index in positive])


@dataclass
class RoiTarget:
    """Targets of the box head for a region. Class 0 is background and has no box.

    Attributes:
        box: of the region.
        label: its class.
        slot: of the picture's boxes the one that it has.
        offsets: of that box.
    """

    box: list[float]
    label: int
    slot: int = 0
    offsets: list[float] = field(default_factory=lambda: [0.0] * 4)


def roi_targets(
    regions: Sequence[Region],
    boxes: Sequence[Box],
    labels: Sequence[int],
    slots: int,
    low: float,
    weights: Sequence[float],
    count: int,
    most_positive: int,
    key_of: Callable[[int], int],
) -> list[RoiTarget]:
    """A picture's, the positives first.

    Args:
        regions: proposals, to which the boxes are added.
        boxes, labels: what is to be found.
        slots: of the proposals at fixed shapes; the boxes come behind.
        low: overlap from which on a region has a box.
        weights: of the offsets.
        count, most_positive, key_of: of the sample; keys are of slots.
    """
    added = [Region(list(box), math.inf, slots + index) for index, box in enumerate(boxes)]
    by_slot = {region.slot: region for region in (*regions, *added)}
    found = dict(zip(by_slot, match([region.box for region in by_slot.values()], boxes, low, low, False), strict=True))
    positive, negative = sample(
        [slot for slot, box in found.items() if box >= 0],
        [slot for slot, box in found.items() if box < 0],
        count,
        most_positive,
        key_of,
    )
    targets = []
    for slot in positive:
        box, own = found[slot], by_slot[slot].box
        targets.append(RoiTarget(own, labels[box], box, encode(boxes[box], own, weights)))
    return targets + [RoiTarget(by_slot[slot].box, 0) for slot in negative]
