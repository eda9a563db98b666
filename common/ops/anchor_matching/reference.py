"""The reference of :mod:`common.ops.anchor_matching`. Shapes: B pictures, A anchors, M boxes at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.ops.boxes import intersection_over_union

BELOW = -1
"""An anchor whose overlaps are all below the lower threshold: background."""
BETWEEN = -2
"""An anchor whose largest overlap lies between the thresholds: it counts as neither."""

OVERLAPS_AT_ONCE = 1 << 24
"""Overlaps of anchors and boxes that are held at a time: 64 MiB, and a few times that for what they are made of."""


@dataclass(frozen=True)
class MatchingRule:
    """Which box an anchor is matched to. An overlap is an intersection over union.

    Attributes:
        low: anchors with smaller overlaps are :data:`BELOW`.
        high: an anchor with a larger overlap is matched to the box that it overlaps most, the first of equals.
        exclusive: whether an overlap equal to ``high`` is too small, and one equal to ``low`` is below it.
        rescue: what boxes get besides. ``every_best``: all anchors that no other overlaps the box more than are matched
            to the box that they themselves overlap most (Faster R-CNN, RetinaNet). ``own_best``: the first of these
            anchors is matched to this box, and of boxes with the same one the last has it (SSD). A box that overlaps
            no anchor gets none.
        pixel: of the overlaps, see :mod:`common.ops.boxes`.
    """

    low: float
    high: float
    exclusive: bool = False
    rescue: Literal["every_best", "own_best"] | None = None
    pixel: float = 0.0


@torch.no_grad()
def match_reference(anchors_A4: Tensor, boxes_BM4: Tensor, count_B: Tensor, rule: MatchingRule) -> Tensor:
    """Reference implementation.

    Args:
        anchors_A4: corners x1, y1, x2, y2, or (B, A, 4) where each picture has its own; the arithmetic is in fp32.
        boxes_BM4: each picture's boxes, then padding of any value.
        count_B: how many boxes each picture has, an integer.
        rule: of the match.

    Returns:
        (B, A), int64: the row of the matched box, or :data:`BELOW` or :data:`BETWEEN`.
    """
    anchors_A4, boxes_BM4 = anchors_A4.float(), boxes_BM4.float()
    if boxes_BM4.device.type == "cpu" and len(count_B):  # where counts can be looked at without a wait
        boxes_BM4 = boxes_BM4[:, : int(count_B.max())]
    batch, most = boxes_BM4.shape[:2]
    matched_BA = torch.full((batch, anchors_A4.shape[-2]), BELOW, dtype=torch.int64, device=boxes_BM4.device)
    if not most:
        return matched_BA
    row_M = torch.arange(most, device=boxes_BM4.device)
    padded_BM1 = (row_M >= count_B.unsqueeze(1)).unsqueeze(2)
    best_BM = torch.zeros((batch, most), device=boxes_BM4.device)
    best_anchor_BM = torch.zeros((batch, most), dtype=torch.int64, device=boxes_BM4.device)
    first_BA = torch.empty_like(matched_BA)
    for part, overlap_BMC in _parts(anchors_A4, boxes_BM4, padded_BM1, rule.pixel):
        overlap_BC, first_BA[:, part] = overlap_BMC.max(1)
        matched_BA[:, part] = _judged(overlap_BC, first_BA[:, part], rule)
        if rule.rescue is not None:
            part_best_BM, anchor_BM = overlap_BMC.max(2)
            more_BM = part_best_BM > best_BM
            best_BM = torch.where(more_BM, part_best_BM, best_BM)
            best_anchor_BM = torch.where(more_BM, anchor_BM + part.start, best_anchor_BM)
    if rule.rescue == "own_best":
        owner_BM = torch.where(best_BM > 0, row_M, BELOW)
        owner_BA = torch.full_like(matched_BA, BELOW).scatter_reduce_(1, best_anchor_BM, owner_BM, "amax")
        return torch.where(owner_BA >= 0, owner_BA, matched_BA)
    if rule.rescue == "every_best":
        for part, overlap_BMC in _parts(anchors_A4, boxes_BM4, padded_BM1, rule.pixel):
            rescued_BC = ((overlap_BMC == best_BM.unsqueeze(2)) & (overlap_BMC > 0)).any(1)
            matched_BA[:, part] = torch.where(rescued_BC, first_BA[:, part], matched_BA[:, part])
    return matched_BA


def _parts(anchors_A4: Tensor, boxes_BM4: Tensor, padded_BM1: Tensor, pixel: float) -> Iterator[tuple[slice, Tensor]]:
    """Some anchors at a time and their overlaps with all boxes, (B, M, anchors); -1 with padding."""
    batch, most = boxes_BM4.shape[:2]
    at_once = max(1, OVERLAPS_AT_ONCE // (batch * most))
    for start in range(0, anchors_A4.shape[-2], at_once):
        part = slice(start, min(start + at_once, anchors_A4.shape[-2]))
        overlap_BMC = intersection_over_union(boxes_BM4, anchors_A4[..., part, :], pixel)
        yield part, torch.where(padded_BM1, -1.0, overlap_BMC)


def _judged(overlap: Tensor, box: Tensor, rule: MatchingRule) -> Tensor:
    """``box``, or what it is instead where its ``overlap`` is too small."""
    if rule.exclusive:
        enough, below = overlap > rule.high, overlap <= rule.low
    else:
        enough, below = overlap >= rule.high, overlap < rule.low
    return torch.where(enough, box, torch.where(below, BELOW, BETWEEN))
