"""What every default box of a picture has to find: made on the device, at fixed shapes, without a wait for it.

Shapes: B pictures, A default boxes in the heads' order, M boxes at most.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.ssd300.config import Facts
from benchmarks.ssd300.default_boxes import coding, reference_boxes, reference_rows
from common.ops.anchor_matching import ANCHOR_MATCHING
from common.ops.anchor_matching.reference import MatchingRule
from common.ops.operation import OperationRequest, select

BACKGROUND = 0
"""The class of a default box that has no box; objects' classes count from 1."""


class Targets:
    """Matches boxes to default boxes and codes them.

    A default box has the box that it overlaps most, if by more than ``match_overlap``; and each box has the default
    box that overlaps it most, of boxes with the same one the last (Liu et al., arXiv:1512.02325, section 2.2, and the
    MLPerf reference). A box without area overlaps nothing and is never looked for.

    Args:
        facts: default boxes and threshold.
        implementations: ``model.implementations``.
        device: of the boxes.

    Attributes:
        choice: name of the implementation of the matching.

    Raises:
        UnsupportedImplementation: naming the key of the configuration.
    """

    def __init__(self, facts: Facts, implementations: Mapping[str, str], device: torch.device) -> None:
        request = OperationRequest(device, torch.float32, {"anchors": len(reference_rows(facts))})
        self.choice, self._match = select(implementations, "anchor_matching", ANCHOR_MATCHING, request)
        overlap = facts.match_overlap
        self._rule = MatchingRule(overlap, overlap, exclusive=True, rescue="own_best")
        self._coding = coding(facts)
        self._rows_A = reference_rows(facts).to(device)
        # Matched in the reference's order, so that of equal overlaps the same default box is the first.
        self._reference_A4 = reference_boxes(facts).to(device)
        self._boxes_A4 = self._reference_A4[self._rows_A]

    @torch.no_grad()
    def __call__(self, boxes_BM4: Tensor, label_BM: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor]:
        """The targets of a batch.

        Args:
            boxes_BM4: corners as shares of the picture, then padding of any value; fp32.
            label_BM: classes from 1; int64.
            count_B: boxes of each picture; int64.

        Returns:
            (B, A) int64: the class of each default box, 0 for background; (B, A, 4) fp32: the offsets of its box, 0
            for background.
        """
        matched_BA = self._match(self._reference_A4, boxes_BM4, count_B, self._rule)[:, self._rows_A]
        object_BA = matched_BA >= 0
        row_BA = matched_BA.clamp(min=0)
        class_BA = torch.where(object_BA, label_BM.gather(1, row_BA), BACKGROUND)
        found_BA4 = boxes_BM4.gather(1, row_BA.unsqueeze(2).expand(-1, -1, 4))
        # Background is coded as the default box itself: what padding holds would have no logarithm.
        found_BA4 = torch.where(object_BA.unsqueeze(2), found_BA4, self._boxes_A4)
        offsets_BA4 = self._coding.encode(found_BA4, self._boxes_A4)
        return class_BA, torch.where(object_BA.unsqueeze(2), offsets_BA4, 0.0)
