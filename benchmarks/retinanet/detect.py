"""Detection: from the heads' outputs to at most 300 detections per picture, batched and with fixed shapes.

The best candidates of each level whose score is above the threshold are decoded. Over all levels, suppression drops
detections that overlap a better one of their class too much. Nothing waits for the device: empty slots are dropped
after the evaluation.

Shapes: N pictures, A anchors of a level, K classes, T candidates of a level, S candidates of all levels, D detections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.retinanet.config import Facts
from benchmarks.retinanet.loss import CODING
from benchmarks.retinanet.model import HeadOutput, RetinaNet
from common.detection.coding import clip, rows_of
from common.detection.detections import Found, in_picture
from common.ops.operation import OperationRequest, select
from common.ops.suppression import SUPPRESSION
from common.ops.triton_support import widen


class Detector:
    """Finds boxes in an evaluation batch.

    Args:
        anchors_A4: anchors of all levels, corners in px of the resized picture.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(self, model: RetinaNet, facts: Facts, anchors_A4: Tensor, implementations: Mapping[str, str]) -> None:
        self._model, self._facts, self._anchors_A4 = model, facts, anchors_A4
        request = OperationRequest(anchors_A4.device, torch.float32, {"candidates": facts.candidates})
        self.choice, self._suppress = select(implementations, "suppression", SUPPRESSION, request)

    def __call__(self, batch: Mapping[str, Tensor]) -> Found:
        """Return the detections of ``image`` (N, C, H, W), in px of the original ``size`` (N, 2)."""
        image_NCHW = batch["image"]
        return self.select(self._model(image_NCHW), image_NCHW.shape[2:], batch["size"])

    @torch.no_grad()
    def select(self, levels: Sequence[HeadOutput], shape: Sequence[int], size_N2: Tensor) -> Found:
        """Return the detections from the heads' outputs, to whose logits the bias is added in place.

        Args:
            shape: height and width of the resized pictures.
            size_N2: height and width of the original pictures.
        """
        facts, start, found = self._facts, 0, []
        height, width = shape
        for level in levels:
            level.logits_NCHW.add_(self._model.logit_bias.view(1, -1, 1, 1))
            logits_NAK, offsets_NA4 = level.flat()
            anchors_A4 = self._anchors_A4[start : start + logits_NAK.shape[1]]
            start += logits_NAK.shape[1]
            found.append(self._candidates(logits_NAK, offsets_NA4, anchors_A4))
        boxes_NS4, score_NS, class_NS = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        boxes_NS4 = clip(boxes_NS4, height, width)
        kept_ND, valid_ND = self._suppress(boxes_NS4, score_NS, class_NS, facts.nms_threshold, facts.detections)
        corners_ND4 = rows_of(boxes_NS4, kept_ND)
        return Found(
            in_picture(corners_ND4, height, width, size_N2),
            score_NS.gather(1, kept_ND),
            class_NS.gather(1, kept_ND),
            valid_ND,
        )

    def _candidates(self, logits_NAK: Tensor, offsets_NA4: Tensor, anchors_A4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best candidates of a level: boxes (N, T, 4), scores (-inf up to the threshold) and classes."""
        anchors, classes = logits_NAK.shape[1:]
        # The T anchors with the highest best class contain the T best candidates: any candidate of another anchor is
        # worse than the best class of each of them.
        best_NA = logits_NAK.amax(2)
        row_NT = best_NA.topk(min(self._facts.candidates, anchors), dim=1).indices
        logits_NTK = rows_of(logits_NAK, row_NT)
        flat = logits_NTK.flatten(1)
        logit_NT, position_NT = flat.topk(min(self._facts.candidates, flat.shape[1]), dim=1)
        row_NT = row_NT.gather(1, position_NT // classes)
        score_NT = torch.sigmoid(widen(logit_NT))
        score_NT = torch.where(score_NT > self._facts.score_threshold, score_NT, -torch.inf)
        offsets_NT4 = rows_of(offsets_NA4, row_NT)
        return CODING.decode(offsets_NT4, anchors_A4[row_NT]), score_NT, position_NT % classes
