"""From what the heads say to at most 300 detections of each picture, batched and at fixed shapes.

Of each level the best candidates above the threshold are decoded; of all levels those are kept that no better one of
their class overlaps too much. Nothing waits for the device: slots that stay empty are dropped after the evaluation.

Shapes: N pictures, A anchors of a level, K classes, T candidates of a level, S of all, D detections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.retinanet.config import Facts
from benchmarks.retinanet.model import HeadOutput, RetinaNet
from benchmarks.retinanet.targets import CODING
from common.detection.coding import clip
from common.detection.detections import Found, in_picture
from common.ops.operation import OperationRequest, select
from common.ops.suppression import SUPPRESSION
from common.ops.triton_support import widen


class Detector:
    """Finds boxes in a batch of an evaluation.

    Args:
        model: the network.
        facts: thresholds and numbers of candidates.
        anchors_A4: of all levels, corners in px of the resized picture.
        implementations: ``model.implementations``.

    Attributes:
        choice: name of the implementation of the suppression.

    Raises:
        UnsupportedImplementation: naming the key of the configuration.
    """

    def __init__(self, model: RetinaNet, facts: Facts, anchors_A4: Tensor, implementations: Mapping[str, str]) -> None:
        self._model, self._facts, self._anchors_A4 = model, facts, anchors_A4
        request = OperationRequest(anchors_A4.device, torch.float32, {"candidates": facts.candidates})
        self.choice, self._suppress = select(implementations, "suppression", SUPPRESSION, request)

    def __call__(self, batch: Mapping[str, Tensor]) -> Found:
        """The detections of ``image`` (N, C, H, W), in pictures whose ``size`` (N, 2) was so before resizing."""
        image_NCHW = batch["image"]
        return self.select(self._model(image_NCHW), image_NCHW.shape[2:], batch["size"])

    @torch.no_grad()
    def select(self, levels: Sequence[HeadOutput], shape: Sequence[int], size_N2: Tensor) -> Found:
        """The detections by what the heads say of pictures of ``shape``, height and width. Overwrites the logits."""
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
        kept_ND, there_ND = self._suppress(boxes_NS4, score_NS, class_NS, facts.nms_threshold, facts.detections)
        corners_ND4 = boxes_NS4.gather(1, kept_ND.unsqueeze(2).expand(-1, -1, 4))
        return Found(
            in_picture(corners_ND4, height, width, size_N2),
            score_NS.gather(1, kept_ND),
            class_NS.gather(1, kept_ND),
            there_ND,
        )

    def _candidates(self, logits_NAK: Tensor, offsets_NA4: Tensor, anchors_A4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes (N, T, 4), scores, which are -inf up to the threshold, and classes of a level's best.

        They are among the anchors whose best classes are the best: every better anchor has one that is better still.
        """
        anchors, classes = logits_NAK.shape[1:]
        best_NA = logits_NAK.amax(2)
        row_NT = best_NA.topk(min(self._facts.candidates, anchors), dim=1).indices
        logits_NTK = logits_NAK.gather(1, row_NT.unsqueeze(2).expand(-1, -1, classes))
        flat = logits_NTK.flatten(1)
        logit_NT, place_NT = flat.topk(min(self._facts.candidates, flat.shape[1]), dim=1)
        row_NT = row_NT.gather(1, place_NT // classes)
        score_NT = torch.sigmoid(widen(logit_NT))
        score_NT = torch.where(score_NT > self._facts.score_threshold, score_NT, -torch.inf)
        offsets_NT4 = offsets_NA4.gather(1, row_NT.unsqueeze(2).expand(-1, -1, 4))
        return CODING.decode(offsets_NT4, anchors_A4[row_NT]), score_NT, place_NT % classes
