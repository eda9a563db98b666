"""Detection: from the network's outputs to at most 200 detections per picture, batched and with fixed shapes.

As in the MLPerf reference: the best 200 candidates per class above the threshold, without those that overlap a better
one of the class by half or more, and then the best 200 over all classes. Boxes are not clipped to the picture. Nothing
waits for the device: empty slots are dropped after the evaluation.

Shapes: N pictures, A default boxes, K classes without background, T candidates of a class, D detections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.ssd300.config import Facts
from benchmarks.ssd300.model import SSD300, Predictions
from benchmarks.ssd300.targets import coding, reference_boxes, reference_rows
from common.detection.coding import rows_of
from common.detection.detections import Found, in_picture
from common.ops.operation import OperationRequest, select
from common.ops.suppression import SUPPRESSION
from common.ops.triton_support import widen


class Detector:
    """Finds boxes in an evaluation batch.

    Attributes:
        class_ids: (K,) int64 on the device: id of each class in detections; initially 1, 2, 3 ...

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(self, model: SSD300, facts: Facts, implementations: Mapping[str, str], device: torch.device) -> None:
        self._model, self._facts, self._coding = model, facts, coding(facts)
        request = OperationRequest(device, torch.float32, {"candidates": facts.candidates})
        self.choice, self._suppress = select(implementations, "suppression", SUPPRESSION, request)
        self._boxes_A4 = reference_boxes(facts)[reference_rows(facts)].to(device)
        # We suppress overlaps equal to the threshold too, but the operation only larger ones.
        self._most_overlap = float(np.nextafter(np.float32(facts.nms_threshold), np.float32(0)))
        self.class_ids = torch.arange(1, facts.classes + 1, device=device)

    def name_classes(self, class_ids: Sequence[int]) -> None:
        """Set the class ids of detections in place, so that a captured graph uses them."""
        self.class_ids.copy_(torch.tensor(class_ids, dtype=torch.int64))

    def __call__(self, batch: Mapping[str, Tensor]) -> Found:
        """Return the detections of ``image`` (N, C, H, W), in px of the original ``size`` (N, 2)."""
        return self.select(self._model(batch["image"]), batch["size"])

    @torch.no_grad()
    def select(self, outputs: Predictions, size_N2: Tensor) -> Found:
        """Return the detections from the network's outputs; ``size_N2`` has the original heights and widths in px."""
        facts = self._facts
        score_NKA = torch.softmax(widen(outputs.logits), 2)[:, :, 1:].transpose(1, 2)
        score_NKT, row_NKT = score_NKA.topk(min(facts.candidates, score_NKA.shape[2]), dim=2)
        score_NKT = torch.where(score_NKT > facts.score_threshold, score_NKT, -torch.inf)
        corners_NA4 = self._coding.decode(outputs.offsets, self._boxes_A4)
        pictures, classes, candidates = score_NKT.shape
        corners_NKT4 = rows_of(corners_NA4, row_NKT.flatten(1)).view(pictures, classes, candidates, 4)

        # Suppression is independent per class: each class of a picture is passed as a separate picture.
        kept, valid = self._suppress(
            corners_NKT4.flatten(0, 1),
            score_NKT.flatten(0, 1),
            torch.zeros_like(row_NKT).flatten(0, 1),
            self._most_overlap,
            candidates,
        )
        kept_NKT, valid_NKT = kept.view_as(row_NKT), valid.view_as(row_NKT)
        score_NKT = torch.where(valid_NKT, score_NKT.gather(2, kept_NKT), -torch.inf)

        score_ND, position_ND = score_NKT.flatten(1).topk(min(facts.detections, classes * candidates), dim=1)
        class_ND = position_ND // candidates
        row_ND = class_ND * candidates + kept_NKT.flatten(1).gather(1, position_ND)
        corners_ND4 = rows_of(corners_NKT4.flatten(1, 2), row_ND)
        return Found(
            in_picture(corners_ND4, 1.0, 1.0, size_N2), score_ND, self.class_ids[class_ND], score_ND > -torch.inf
        )
