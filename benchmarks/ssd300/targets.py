"""Targets of every default box, computed on the device with fixed shapes and without waiting for it.

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
"""Class of a default box without a matched box. Object classes start at 1."""


class Targets:
    """Matches boxes to default boxes and encodes them.

    A default box is matched to the box with the largest overlap, if that is above ``match_overlap``. In addition, each
    box gets the default box with the largest overlap; if several boxes want the same one, the last gets it (Liu et
    al., arXiv:1512.02325, section 2.2, and the MLPerf reference). A box without area is never matched.

    Args:
        implementations: ``model.implementations``.

    Attributes:
        choice: name of the chosen implementation of the matching.

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
        found_BA4 = boxes_BM4.gather(1, row_BA.unsqueeze(2).expand(-1, -1, 4))
        # Background is encoded as the default box itself, because the logarithm of padding may not exist.
        found_BA4 = torch.where(object_BA.unsqueeze(2), found_BA4, self._boxes_A4)
        offsets_BA4 = self._coding.encode(found_BA4, self._boxes_A4)
        return class_BA, torch.where(object_BA.unsqueeze(2), offsets_BA4, 0.0)
