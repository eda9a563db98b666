"""Match every anchor of a picture to the ground-truth box that it has to predict.

Ren et al., arXiv:1506.01497, section 3.1.2 (thresholds, and the best anchors of a box that no anchor overlaps enough);
Liu et al., arXiv:1512.02325, section 2.2 (rule of SSD).

Shapes: B pictures, A anchors, capacity for M boxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.ops.boxes import intersection_over_union
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

BELOW = -1
"""Match of an anchor whose overlaps are all below the lower threshold: background."""
BETWEEN = -2
"""Match of an anchor whose largest overlap is between the thresholds: neither background nor a box."""

OVERLAPS_AT_ONCE = 1 << 24
"""Largest number of overlaps to compute at a time: 64 MiB, and a few times as much for temporary tensors."""


@dataclass(frozen=True)
class MatchingRule:
    """The rule that matches anchors to boxes. An overlap is an intersection over union.

    Attributes:
        low: anchors whose largest overlap is smaller are :data:`BELOW`.
        high: anchors whose largest overlap is at least this are matched to that box; the first box wins ties.
        exclusive: whether an overlap equal to ``high`` is too small, and an overlap equal to ``low`` is :data:`BELOW`.
        rescue: additional matches for each box that overlaps any anchor. ``every_best`` (Faster R-CNN, RetinaNet): all
            anchors that have the largest overlap with the box are matched, each to the box that it overlaps most.
            ``own_best`` (SSD): the first of these anchors is matched to this box; if boxes share an anchor, the last
            box wins.
        pixel: addition to the length of a side, 0 or 1 (:mod:`common.ops.boxes`).
    """

    low: float
    high: float
    exclusive: bool = False
    rescue: Literal["every_best", "own_best"] | None = None
    pixel: float = 0.0


@torch.no_grad()
def match_reference(anchors_A4: Tensor, boxes_BM4: Tensor, count_B: Tensor, rule: MatchingRule) -> Tensor:
    """Match anchors to boxes in fp32.

    Args:
        anchors_A4: corners x1, y1, x2, y2; (B, A, 4) if each picture has its own anchors.
        boxes_BM4: boxes of each picture, followed by padding of any value.
        count_B: number of boxes of each picture, any integer dtype.

    Returns:
        (B, A), int64: the index of the matched box, :data:`BELOW` or :data:`BETWEEN`.
    """
    anchors_A4, boxes_BM4 = anchors_A4.float(), boxes_BM4.float()
    if boxes_BM4.device.type == "cpu" and len(count_B):  # reading counts does not wait for a GPU
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
    """Yield slices of anchors and their overlaps with all boxes, (B, M, anchors); -1 for padding."""
    batch, most = boxes_BM4.shape[:2]
    at_once = max(1, OVERLAPS_AT_ONCE // (batch * most))
    for start in range(0, anchors_A4.shape[-2], at_once):
        part = slice(start, min(start + at_once, anchors_A4.shape[-2]))
        overlap_BMC = intersection_over_union(boxes_BM4, anchors_A4[..., part, :], pixel)
        yield part, torch.where(padded_BM1, -1.0, overlap_BMC)


def _judged(overlap: Tensor, box: Tensor, rule: MatchingRule) -> Tensor:
    """Return ``box`` where its ``overlap`` is large enough, elsewhere :data:`BELOW` or :data:`BETWEEN`."""
    if rule.exclusive:
        enough, below = overlap > rule.high, overlap <= rule.low
    else:
        enough, below = overlap >= rule.high, overlap < rule.low
    return torch.where(enough, box, torch.where(below, BELOW, BETWEEN))


ANCHOR_MATCHING = Operation(
    "anchor_matching",
    match_reference,
    {
        "triton": triton_kernels("common.ops.anchor_matching.triton:match", dtypes=()),
    },
    kernel_names=(("matching", r"^anchor_matching_"),),
    cases="common.ops.anchor_matching.cases",
)
"""Signature: that of :func:`match_reference`. Arithmetic is always fp32, so all implementations agree exactly."""
