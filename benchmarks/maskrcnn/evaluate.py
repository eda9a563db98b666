"""Mask R-CNN's evaluation: connects reader, network, proposals, detections, masks and scores.

A captured pass begins with a reader's batch of decoded pictures. There is one pass per padded shape.

Legend: B pictures of a batch, S side of a slot, D detections of all pictures, M height and width of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts, MaskRCNNConfig
from benchmarks.maskrcnn.data import MaskData
from benchmarks.maskrcnn.heads import RpnOutput
from benchmarks.maskrcnn.model import MaskRCNN
from benchmarks.maskrcnn.ops.paste import PASTE, find_runs
from benchmarks.maskrcnn.ops.roi_align import ROI_ALIGN, Regions, RoiAlign
from benchmarks.maskrcnn.ops.roi_align.reference import LEVELS
from benchmarks.maskrcnn.pictures import Preparer
from benchmarks.maskrcnn.prepared import open_prepared
from benchmarks.maskrcnn.proposals import PIXEL, STRIDES, Proposals, Proposer, Selection, anchors
from benchmarks.maskrcnn.targets import box_coding
from common.contract.evaluation import Scorer
from common.data.batches import EvalSource
from common.detection.annotations import Annotations
from common.detection.coding import clip, rows_of
from common.detection.detections import PADDING, Found, FoundMasks, as_origin_and_size, corners_in_picture
from common.detection.evaluation import BatchShape, DetectionEvaluation
from common.distributed.layout import Layout
from common.ops.operation import OperationRequest, select
from common.ops.suppression import SUPPRESSION
from common.ops.triton_support import widen

REGION_STRIDES = STRIDES[:LEVELS]
"""Strides of the levels from which regions are taken."""

Propose = Callable[[Sequence[RpnOutput], Tensor], Proposals]
"""Function from the region proposal network's outputs and (B, 2) heights and widths to proposals; capturable."""


class BestBoxes(NamedTuple):
    """The best boxes of each picture.

    Attributes:
        corners_BD4: x1, y1, x2, y2 in px of the resized pictures.
        score_BD: scores; -inf in empty slots.
        label_BD: classes from 1; any value in empty slots.
    """

    corners_BD4: Tensor
    score_BD: Tensor
    label_BD: Tensor


class Detector:
    """Finds objects in pictures.

    Args:
        facts: thresholds and numbers of candidates.
        roi_align: implementation of RoIAlign.

    Attributes:
        class_ids: (K,) int64 on the device: id of each class in detections; initially 1, 2, 3 ...

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(
        self,
        model: MaskRCNN,
        facts: Facts,
        roi_align: RoiAlign,
        implementations: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self._model, self._facts, self._roi_align = model, facts, roi_align
        self._coding = box_coding(facts)
        request = OperationRequest(device, torch.float32, {"candidates": facts.eval_proposals})
        self.choice, self._suppress = select(implementations, "suppression", SUPPRESSION, request)
        self.class_ids = torch.arange(1, facts.classes + 1, device=device)

    def name_classes(self, class_ids: Sequence[int]) -> None:
        """Set the class ids of detections in place, so that a captured graph uses them."""
        self.class_ids.copy_(torch.tensor(class_ids, dtype=torch.int64))

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor], propose: Propose) -> Found:
        """Return the detections of a batch.

        Args:
            batch: ``image`` (B, 3, H, W), padded pictures; ``size`` (B, 2), heights and widths without padding;
                ``original`` (B, 2), heights and widths before resizing, px.
            propose: returns the proposals for pictures of this padded shape.
        """
        facts, size_B2 = self._facts, batch["size"].float()
        levels = self._model.pyramid(batch["image"])
        proposals = propose(self._model.propose(levels), size_B2)
        valid_BS = proposals.score_BS > -torch.inf
        regions_RCSS = self._regions(levels, proposals.boxes_BS4, valid_BS, facts.box_resolution)
        logits_RK, deltas_RX = self._model.box_head(regions_RCSS)
        boxes = self.select(logits_RK, deltas_RX, proposals, size_B2)
        valid_BD = boxes.score_BD > -torch.inf
        regions_RCSS = self._regions(levels, boxes.corners_BD4, valid_BD, facts.mask_resolution)
        label_R = torch.where(valid_BD, boxes.label_BD, -1).flatten()
        probability_BDMM = self._model.mask_head(regions_RCSS, label_R).sigmoid().unflatten(0, valid_BD.shape)
        height_B1, width_B1 = size_B2.split(1, 1)
        corners_BD4 = corners_in_picture(boxes.corners_BD4, height_B1, width_B1, batch["original"])
        return Found(
            as_origin_and_size(corners_BD4, PIXEL),
            boxes.score_BD,
            self.class_ids[boxes.label_BD - 1],
            valid_BD,
            FoundMasks(corners_BD4, probability_BDMM, batch["original"]),
        )

    @torch.no_grad()
    def select(self, logits_RK: Tensor, deltas_RX: Tensor, proposals: Proposals, size_B2: Tensor) -> BestBoxes:
        """Return the best boxes from the outputs of the box head.

        Args:
            logits_RK: (B S, K + 1), background first.
            deltas_RX: (B S, 4 (K + 1)), offsets of the boxes of all classes.
            proposals: S proposals per picture; empty slots have score -inf.
            size_B2: heights and widths of the pictures, px.
        """
        facts, (pictures, candidates) = self._facts, proposals.score_BS.shape
        score_BSK = torch.softmax(widen(logits_RK), 1)[:, 1:].view(pictures, candidates, -1)
        counts_BSK = (score_BSK > facts.score_threshold) & (proposals.score_BS > -torch.inf).unsqueeze(2)
        score_BKS = torch.where(counts_BSK, score_BSK, -torch.inf).transpose(1, 2).contiguous()
        deltas_BSK4 = deltas_RX.view(pictures, candidates, -1, 4)[:, :, 1:]
        corners_BSK4 = self._coding.decode(deltas_BSK4, proposals.boxes_BS4.unsqueeze(2))
        height_B11, width_B11 = (side[:, None] for side in size_B2.split(1, 1))
        corners_BSK4 = clip(corners_BSK4, height_B11, width_B11, PIXEL)
        corners_BKS4 = corners_BSK4.transpose(1, 2).contiguous()

        # Suppression is independent per class: each class of a picture is passed as a separate picture.
        kept, valid = self._suppress(
            corners_BKS4.flatten(0, 1),
            score_BKS.flatten(0, 1),
            None,
            facts.nms_threshold,
            facts.detections,
            pixel=PIXEL,
        )
        best = kept.shape[1]
        kept_BKT, valid_BKT = (slots.view(pictures, -1, best) for slots in (kept, valid))
        score_BKT = torch.where(valid_BKT, score_BKS.gather(2, kept_BKT), -torch.inf)
        score_BD, position_BD = score_BKT.flatten(1).sort(dim=1, descending=True, stable=True)
        score_BD, position_BD = score_BD[:, : facts.detections], position_BD[:, : facts.detections]
        class_BD = position_BD // best
        row_BD = class_BD * candidates + kept_BKT.flatten(1).gather(1, position_BD)
        corners_BD4 = rows_of(corners_BKS4.flatten(1, 2), row_BD)
        return BestBoxes(corners_BD4, score_BD, class_BD + 1)

    def _regions(self, levels: Sequence[Tensor], boxes_BR4: Tensor, valid_BR: Tensor, resolution: int) -> Tensor:
        regions, samples = [Regions(boxes_BR4, valid_BR, resolution)], self._facts.roi_samples
        (features_RCSS,) = self._roi_align(levels[:LEVELS], regions, REGION_STRIDES, samples)
        return features_RCSS


def evaluation(
    model: MaskRCNN,
    own: MaskRCNNConfig,
    data: MaskData,
    preparer: Preparer,
    layout: Layout,
    capture: bool,
    scorer: Scorer,
) -> tuple[DetectionEvaluation, dict[str, str]]:
    """Build the evaluation: COCO's mean average precision of boxes and of masks, ``BBOX`` and ``SEGM``.

    Args:
        model: the network, on its final device.
        preparer: computes the network's input from decoded pictures.
        capture: replay the passes as CUDA graphs.

    Returns:
        The evaluation, and operation to the chosen implementation.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """
    facts, device, implementations = own.facts, layout.device, own.model.implementations
    align = select(implementations, "roi_align", ROI_ALIGN, OperationRequest(device, _dtype(model)))
    pasting = select(implementations, "paste", PASTE, OperationRequest(device, torch.float32))
    detector = Detector(model, facts, align.function, implementations, device)
    selection = Selection(facts.eval_candidates, facts.eval_proposals, "picture")
    proposer = Proposer(facts, selection, implementations, device)

    def batches(shape: tuple[int, int]) -> BatchShape:
        of_levels = [level_A4.to(device) for level_A4 in anchors(facts, shape)]

        def propose(outputs: Sequence[RpnOutput], size_B2: Tensor) -> Proposals:
            return proposer([output.flat() for output in outputs], of_levels, size_B2)

        def detect(inputs: Mapping[str, Tensor]) -> Found:
            return detector(preparer.evaluation(inputs, shape), propose)

        return BatchShape(detect, example_inputs(facts, own.reader.eval_batch, shape, layout))

    def open_source(root: Path) -> EvalSource:
        detector.name_classes(data.category_ids(root))
        return data.open_eval(root, layout, own.reader.eval_batch)

    made = DetectionEvaluation(
        model,
        {shape: batches(shape) for shape in own.reader.shapes},
        open_source,
        facts.detections,
        layout,
        capture,
        scorer,
        partial(find_runs, pasting.function, facts.mask_threshold),
    )
    return made, {"suppression": detector.choice, "roi_align": align.name, "paste": pasting.name}


def ground_truth(root: Path) -> Annotations:
    """Return all objects of the validation pictures under ``root``, with segmentations.

    Raises:
        DataError: manifest or files are missing or damaged.
    """
    return open_prepared(root).truth()


def example_inputs(facts: Facts, batch: int, shape: tuple[int, int], layout: Layout) -> dict[str, Tensor]:
    """Return a synthetic batch of random pictures for padded ``shape``, on the device, in the format of the readers."""
    (height, width), side = shape, facts.longest_side
    scale = min(1.0, side / max(shape))
    decoded = [max(int(length * scale), 1) for length in shape]
    noise = torch.randint(256, (batch, side, side, 3), generator=layout.generator("example")).to(torch.uint8)
    inputs = {
        "pixels": noise,
        "decoded_size": torch.tensor([decoded] * batch, dtype=torch.int32),
        "size": torch.tensor([[float(height), float(width)]] * batch),
        "picture": torch.full((batch,), PADDING, dtype=torch.int64),
    }
    return {name: tensor.to(layout.device) for name, tensor in inputs.items()}


def _dtype(model: MaskRCNN) -> torch.dtype:
    return next(model.parameters()).dtype
