"""Targets of the network at every anchor. Shapes: B pictures, M boxes at most, A anchors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.retinanet.config import Facts
from common.detection.coding import BoxCoding
from common.ops.anchor_matching import ANCHOR_MATCHING
from common.ops.anchor_matching.reference import BELOW, BETWEEN, MatchingRule
from common.ops.operation import OperationRequest, select

CODING = BoxCoding(weights=(1.0, 1.0, 1.0, 1.0), most_growth=1000 / 16)

BACKGROUND, IGNORED = BELOW, BETWEEN
"""Values that replace a class."""


class AnchorTargets:
    """Computes targets from boxes, on the device and with fixed shapes.

    Args:
        anchors_A4: corners x1, y1, x2, y2 in px of the resized picture.
        implementations: ``model.implementations``.

    Attributes:
        choice: name of the chosen implementation of the matching.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(self, facts: Facts, anchors_A4: Tensor, implementations: Mapping[str, str]) -> None:
        self._anchors_A4 = anchors_A4
        self._rule = MatchingRule(facts.match_low, facts.match_high, rescue="every_best")
        request = OperationRequest(anchors_A4.device, torch.float32, {"anchors": len(anchors_A4)})
        self.choice, self._match = select(implementations, "anchor_matching", ANCHOR_MATCHING, request)

    @torch.no_grad()
    def __call__(self, boxes_BM4: Tensor, label_BM: Tensor, count_B: Tensor) -> dict[str, Tensor]:
        """Return the targets of a micro-batch, without waiting for the device.

        Args:
            boxes_BM4: box corners in px, followed by padding.
            label_BM: class of each box.
            count_B: number of boxes of each picture.

        Returns:
            ``class`` (B, A), int32: class of the matched box, :data:`BACKGROUND` or :data:`IGNORED`; ``offsets`` (B,
            A, 4), fp32: offsets of the matched box from the anchor, 0 without one; ``weight`` (B,), fp32: weight of a
            picture in the loss, 1 / (anchors with a box * B).
        """
        row_BA = self._match(self._anchors_A4, boxes_BM4, count_B, self._rule)
        has_box_BA = row_BA >= 0
        known_BA = row_BA.clamp(min=0)
        class_BA = torch.where(has_box_BA, label_BM.gather(1, known_BA), row_BA)
        box_BA4 = boxes_BM4.gather(1, known_BA.unsqueeze(2).expand(-1, -1, 4))
        offsets_BA4 = torch.where(has_box_BA.unsqueeze(2), CODING.encode(box_BA4, self._anchors_A4), 0.0)
        weight_B = 1.0 / (has_box_BA.sum(1).clamp(min=1) * len(row_BA))
        return {"class": class_BA.int(), "offsets": offsets_BA4.float(), "weight": weight_B.float()}
