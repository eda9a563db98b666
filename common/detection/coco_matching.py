"""Matching of detections to ground truth, for all pictures and classes at once.

A group is everything of one picture and one class. Detections of different groups do not compete. So the first
detection of every group chooses at the same time, then the second of every group, and so on. Only detections that
overlap an object of their group by the smallest threshold take part. Overlaps may be those of boxes or of masks.

Shapes: G objects of ground truth, D detections, C detections that take part, P pairs, T thresholds, S ranges of area.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAIRS_AT_ONCE = 4_000_000
"""Pairs of a detection and a box whose overlap is computed at a time."""


@dataclass(frozen=True)
class Judged:
    """Ground-truth objects, and which of them count.

    Attributes:
        crowd: (G,) whether the object is a crowd, that is many objects as one.
        ignored: (G, S) whether it does not count in a range of areas; crowds never count.
    """

    crowd: Tensor
    ignored: Tensor


@dataclass(frozen=True)
class Grouped:
    """Boxes in groups.

    Attributes:
        group: (N,) numbers of groups.
        box: (N, 4) x, y, width, height; float64.
    """

    group: Tensor
    box: Tensor


@dataclass(frozen=True)
class Pairs:
    """Pairs of a detection and a ground-truth object of its group that overlap, in any order.

    Attributes:
        detection: (P,) rows of detections.
        truth: (P,) rows of ground truth.
        overlap: (P,) intersection over union, for a crowd over the detection's area; float64.
    """

    detection: Tensor
    truth: Tensor
    overlap: Tensor


@dataclass(frozen=True)
class Matches:
    """Result of the matching.

    Attributes:
        row: (C,) rows of the detections that take part among all detections, ascending.
        right: (C, T, S) whether the detection took an object that counts.
        void: (C, T, S) whether the detection took an object that does not count.
    """

    row: Tensor
    right: Tensor
    void: Tensor


def match(pairs: Pairs, truth: Judged, group_D: Tensor, thresholds: tuple[float, ...]) -> Matches:
    """Let every detection take an object, for each threshold and each range of areas.

    Args:
        pairs: pairs with at least the smallest threshold; other pairs are ignored.
        truth: objects to find; of equal overlaps the last one is taken.
        group_D: groups of the detections. Within a group, detections choose in this order.
        thresholds: T overlaps, ascending.
    """
    pairs = _in_order(pairs, thresholds[0])
    row_C, local_P, count_C = torch.unique_consecutive(pairs.detection, return_inverse=True, return_counts=True)
    device, taking = row_C.device, len(row_C)
    ranges, boxes = truth.ignored.shape[1], len(truth.crowd)
    right_CTS = torch.zeros((taking, len(thresholds), ranges), dtype=torch.bool, device=device)
    void_CTS = torch.zeros_like(right_CTS)
    if not taking:
        return Matches(row_C, right_CTS, void_CTS)

    # Sort pairs by turn: a turn is the n-th best box of the r-th detection of every group. Detections with more boxes
    # come first, so that the detections with an n-th box are the first rows among those with any box.
    most = int(count_C.max())
    nth_P = torch.arange(len(local_P), device=device) - (count_C.cumsum(0) - count_C)[local_P]
    turn_P = rank_of_equals(group_D[row_C])[local_P] * most + nth_P
    order_P = (turn_P * most + (most - count_C[local_P])).sort(stable=True).indices
    local_P, box_P, turn_P = local_P[order_P], pairs.truth[order_P], turn_P[order_P]
    reached_PT = pairs.overlap[order_P].unsqueeze(1) >= torch.tensor(thresholds, dtype=torch.float64, device=device)

    # The additional last row is for detections that take no box or a crowd. It is never read as taken.
    taken_GTS = torch.zeros((boxes + 1, len(thresholds), ranges), dtype=torch.bool, device=device)
    ignored_GS = torch.cat([truth.ignored, truth.ignored.new_zeros((1, ranges))])
    taken_as_G = torch.where(truth.crowd, boxes, torch.arange(boxes, device=device))
    taken_as_G = torch.cat([taken_as_G, taken_as_G.new_full((1,), boxes)])
    cell_TS = torch.arange(taken_GTS[0].numel(), device=device).view(taken_GTS.shape[1:])

    ends = turn_P.bincount(minlength=-(-int(turn_P[-1] + 1) // most) * most).cumsum(0).tolist()
    for first in range(0, len(ends), most):
        start = ends[first - 1] if first else 0
        choosing_C = local_P[start : ends[first]]
        choice_CTS = torch.full((len(choosing_C), *taken_GTS.shape[1:]), boxes, device=device)
        poor_CTS = torch.ones_like(choice_CTS, dtype=torch.bool)
        for end in ends[first : first + most]:
            if end == start:
                break
            box, rows = box_P[start:end], slice(0, end - start)
            counts = ~ignored_GS[box].unsqueeze(1)
            free = reached_PT[start:end].unsqueeze(2) & ~taken_GTS[box]
            better = free & ((choice_CTS[rows] == boxes) | (poor_CTS[rows] & counts))
            choice_CTS[rows] = torch.where(better, box[:, None, None], choice_CTS[rows])
            poor_CTS[rows] = torch.where(better, ~counts, poor_CTS[rows])
            start = end
        some_CTS = choice_CTS != boxes
        right_CTS[choosing_C], void_CTS[choosing_C] = some_CTS & ~poor_CTS, some_CTS & poor_CTS
        taken_GTS.view(-1)[taken_as_G[choice_CTS] * cell_TS.numel() + cell_TS] = True
    return Matches(row_C, right_CTS, void_CTS)


def rank_of_equals(values_D: Tensor) -> Tensor:
    """Return for each element how many equal values come before it."""
    sorted_D, order_D = values_D.sort(stable=True)
    position_D = torch.arange(len(values_D), device=values_D.device)
    starts_D = torch.ones_like(values_D, dtype=torch.bool)
    starts_D[1:] = sorted_D[1:] != sorted_D[:-1]
    rank_D = torch.empty_like(position_D)
    rank_D[order_D] = position_D - torch.where(starts_D, position_D, 0).cummax(0).values
    return rank_D


def portions(bounds: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Yield first and end of consecutive pieces with at most ``limit`` entries together, or of one larger piece.

    Args:
        bounds: start of each piece, then the end of the last one.
    """
    first = 0
    while first < len(bounds) - 1:
        end = max(first + 1, int(np.searchsorted(bounds, bounds[first] + limit, side="right")) - 1)
        yield first, end
        first = end


def box_pairs(truth: Grouped, crowd_G: Tensor, found: Grouped, threshold: float) -> Pairs:
    """Return pairs of detections and ground truth of one group whose boxes overlap by at least ``threshold``.

    Args:
        truth: boxes sorted by group.
        crowd_G: whether the box is around many objects.
        found: boxes in any order of groups.
        threshold: smallest overlap.
    """
    start_D = torch.searchsorted(truth.group, found.group)
    count_D = torch.searchsorted(truth.group, found.group, right=True) - start_D
    row_D = count_D.nonzero().squeeze(1)
    start_D, count_D = start_D[row_D], count_D[row_D]
    bounds = np.concatenate([np.zeros(1, np.int64), count_D.cumsum(0).cpu().numpy()])
    detection_P, box_P, overlap_P = [row_D[:0]], [row_D[:0]], [found.box[:0, 0]]
    for first, end in portions(bounds, PAIRS_AT_ONCE):
        count = count_D[first:end]
        local = torch.repeat_interleave(count)
        nth = torch.arange(len(local), device=count.device) - (count.cumsum(0) - count)[local]
        detection, box = row_D[first:end][local], start_D[first:end][local] + nth
        overlap = _overlap(found.box[detection], truth.box[box], crowd_G[box])
        enough = (overlap >= threshold).nonzero().squeeze(1)
        for values, column in ((detection_P, detection), (box_P, box), (overlap_P, overlap)):
            values.append(column[enough])
    return Pairs(torch.cat(detection_P), torch.cat(box_P), torch.cat(overlap_P))


def _in_order(pairs: Pairs, threshold: float) -> Pairs:
    """Return the pairs with at least ``threshold``, by row of the detection, then by falling overlap."""
    enough = (pairs.overlap >= threshold).nonzero().squeeze(1)
    detection, truth, overlap = pairs.detection[enough], pairs.truth[enough], pairs.overlap[enough]
    order = truth.sort(stable=True, descending=True).indices  # of equal overlaps the last one is taken
    order = order[overlap[order].sort(stable=True, descending=True).indices]
    order = order[detection[order].sort(stable=True).indices]
    return Pairs(detection[order], truth[order], overlap[order])


def _overlap(detection_P4: Tensor, box_P4: Tensor, crowd_P: Tensor) -> Tensor:
    """Return intersection over union, for a crowd over the detection's area; (P,)."""
    x, y, width, height = detection_P4.unbind(1)
    box_x, box_y, box_width, box_height = box_P4.unbind(1)
    shared_width = torch.minimum(x + width, box_x + box_width) - torch.maximum(x, box_x)
    shared_height = torch.minimum(y + height, box_y + box_height) - torch.maximum(y, box_y)
    shared, own = shared_width * shared_height, width * height
    union = torch.where(crowd_P, own, own + box_width * box_height - shared)
    return torch.where((shared_width > 0) & (shared_height > 0), shared / union, 0.0)
