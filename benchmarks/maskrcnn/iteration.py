"""Forward pass of training: from pictures to the five losses, in fixed slots and with concurrent branches.

The losses of the region proposal network need only the pyramid. Their branch runs anchor matching, sampling, losses
and the whole backward pass down to the pyramid, concurrently with the selection of proposals, whose many small kernels
leave a GPU idle. A second branch runs the box head with its backward pass, and the mask targets, concurrently with the
mask head.

Legend: B pictures, M object slots, R slots for sampled proposals of a picture, P slots that can have a mask, S height
and width of features, Q = B P.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import MaskRCNNConfig
from benchmarks.maskrcnn.loss import box_losses, first_slots, mask_loss, rpn_losses
from benchmarks.maskrcnn.model import MaskRCNN, RpnOutput
from benchmarks.maskrcnn.ops.mask_targets import MASK_TARGETS
from benchmarks.maskrcnn.ops.roi_align import ROI_ALIGN, Regions
from benchmarks.maskrcnn.ops.roi_align.reference import LEVELS
from benchmarks.maskrcnn.pictures import Shape
from benchmarks.maskrcnn.polygon_table import PolygonTable
from benchmarks.maskrcnn.proposals import STRIDES, Proposer, Selection, anchors, with_truth
from benchmarks.maskrcnn.targets import RoiSample, RoiTargets, RpnTargets
from common.ops.operation import OperationRequest, choose
from common.step.branches import Branch, cut, detached, early
from common.step.train_step import Losses


class TrainingPass:
    """Computes the losses of a micro-batch.

    Args:
        model: the network, on its final device and in its final dtype.
        table: outlines of all training objects, on the same device.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(self, model: MaskRCNN, own: MaskRCNNConfig, table: PolygonTable, dtype: torch.dtype) -> None:
        facts, implementations, device = own.facts, own.model.implementations, table.xy.device
        self._model, self._facts, self._table = model, facts, table
        self._anchors = {
            shape: [level_A4.to(device) for level_A4 in anchors(facts, shape)] for shape in own.reader.shapes
        }
        self._rpn_branch, self._box_branch = Branch(device), Branch(device)

        selection = Selection(facts.train_candidates, own.hparams.image_candidates, own.hparams.candidates_from)
        self._propose = Proposer(facts, selection, implementations, device)
        self._rpn_targets = RpnTargets(facts, implementations, device)
        self._roi_targets = RoiTargets(facts, implementations, device)
        request = OperationRequest(device, dtype, {"size": facts.mask_size})
        chosen = choose(implementations, {"roi_align": ROI_ALIGN, "mask_targets": MASK_TARGETS}, request)
        self._align, self._draw = chosen["roi_align"].function, chosen["mask_targets"].function
        self.choices = {
            "anchor_matching": self._rpn_targets.choice,
            "suppression": self._propose.choice,
            **{name: choice.name for name, choice in chosen.items()},
        }

    def __call__(self, tensors: Mapping[str, Tensor], shape: Shape, scale: Tensor) -> Losses:
        """Return the losses of a micro-batch.

        Args:
            tensors: ``image`` (B, 3, H, W); ``size`` (B, 2), heights and widths of the pictures in it; ``boxes`` (B,
                M, 4), ``label`` (B, M) and ``count`` (B,), the objects; ``object`` (B,), table row of each picture's
                first object; ``transform`` (B, 4), see ``ops.mask_targets``; ``real`` (B,), False for slots that do
                not count; ``seed`` (1,), random seed.
            shape: H and W, one of ``reader.shapes``.
            scale: 0-d factor by which the caller multiplies the sum of the losses before backward.

        Returns:
            The sum of the five losses, and as metrics ``loss``, its parts, which have equal weights, and
                ``mask_slots``, the number of proposals with a mask target.
        """
        model, facts = self._model, self._facts
        boxes_BM4, label_BM, count_B = tensors["boxes"], tensors["label"], tensors["count"]
        size_B2, real_B, seed = tensors["size"], tensors["real"], tensors["seed"]
        anchors_LA4 = self._anchors[shape]

        levels = model.pyramid(tensors["image"])
        rpn_levels = cut(levels)
        with self._rpn_branch.beside():
            outputs = model.propose(rpn_levels)
        self._rpn_branch.join()
        with self._rpn_branch.beside():
            sample = self._rpn_targets(torch.cat(anchors_LA4), boxes_BM4, count_B, size_B2, real_B, seed)
            losses = rpn_losses(outputs, sample, facts.rpn_beta)
            rpn = early(losses, scale, list(zip(levels, rpn_levels, strict=True)), list(model.rpn.parameters()))
            outputs, (objectness, rpn_boxes) = [RpnOutput(*detached(level)) for level in outputs], detached(losses)

        proposals = self._propose([level.flat() for level in outputs], anchors_LA4, size_B2, real_B)
        rois = self._roi_targets(with_truth(proposals, boxes_BM4, count_B), boxes_BM4, label_BM, count_B, seed)
        masked_BP = first_slots(rois.positives_B, facts.mask_slots)
        regions = [
            Regions(rois.boxes_BR4, first_slots(rois.total_B, facts.roi_sampled), facts.box_resolution),
            Regions(rois.boxes_BR4[:, : facts.mask_slots], masked_BP, facts.mask_resolution),
        ]
        box_RCSS, mask_QCSS = self._align(levels[:LEVELS], regions, STRIDES[:LEVELS], facts.roi_samples)

        (box_leaf_RCSS,) = cut([box_RCSS])
        with self._box_branch.beside():
            logits_RK, deltas_RX = model.box_head(box_leaf_RCSS)
            losses = box_losses(logits_RK, deltas_RX, rois, facts.box_beta)
            box = early(losses, scale, [(box_RCSS, box_leaf_RCSS)], list(model.box_head.parameters()))
            classifier, boxes = detached(losses)
            del losses, logits_RK, deltas_RX
            target_QHW = self._targets(rois, masked_BP, tensors["object"], tensors["transform"])
        class_Q = torch.where(masked_BP, rois.label_BR[:, : facts.mask_slots], -1).flatten()
        logits_QHW = model.mask_head(mask_QCSS, class_Q)
        self._box_branch.join()
        mask = mask_loss(logits_QHW, target_QHW, class_Q)
        self._rpn_branch.join()
        total = rpn.total() + box.total() + mask
        metrics = {
            "loss": total.detach(),
            "loss_classifier": classifier,
            "loss_box_reg": boxes,
            "loss_mask": mask.detach(),
            "loss_objectness": objectness,
            "loss_rpn_box_reg": rpn_boxes,
            "mask_slots": rois.positives_B.sum(),
        }
        return Losses(total, metrics)

    def _targets(self, rois: RoiSample, masked_BP: Tensor, object_B: Tensor, transform_B4: Tensor) -> Tensor:
        """Return the targets of the mask head, (Q, height, width) uint8."""
        slots = masked_BP.shape[1]
        object_BP = torch.where(masked_BP, object_B.unsqueeze(1) + rois.slot_BR[:, :slots], -1)
        transform_BP4 = transform_B4.unsqueeze(1).expand(-1, slots, -1)
        boxes_BP4 = rois.boxes_BR4[:, :slots]
        targets_QHW: Tensor = self._draw(
            self._table,
            object_BP.flatten(),
            boxes_BP4.flatten(0, 1),
            transform_BP4.flatten(0, 1),
            self._facts.mask_size,
        )
        return targets_QHW
