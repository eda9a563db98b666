"""One forward pass of training: from pictures to the five losses, on fixed slots, with branches beside each other.

What the losses of the region proposal network need is known as soon as the pyramid is: matching of anchors, sampling,
losses and the whole backward pass down to the pyramid run on a branch, beside the choice of proposals, whose many small
kernels leave a GPU idle. The box head, with its backward pass, and the masks to be learned run beside the mask head.

Legend: B pictures, M object slots, R slots of sampled proposals of a picture, P those of them that can have a mask,
S height and width of features, N C H W a level.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from benchmarks.maskrcnn.model import MaskRCNN
from common.step.branches import Branch, cut


@dataclass(frozen=True)
class DetectionLosses:
    """The parts of the loss, 0-d, which all count alike.

    Attributes:
        loss_objectness, loss_rpn_box_reg: of the region proposal network.
        loss_classifier, loss_box_reg: of the box head.
        loss_mask: of the mask head.
        total: their sum, which is differentiated.
        mask_slots: how many proposals had a mask to learn.
    """

    total: Tensor
    loss_classifier: Tensor
    loss_box_reg: Tensor
    loss_mask: Tensor
    loss_objectness: Tensor
    loss_rpn_box_reg: Tensor
    mask_slots: Tensor

    def metrics(self) -> dict[str, Tensor]:
        """All of it by the names of the log."""
        named = {field.name: getattr(self, field.name).detach() for field in fields(self)}
        return {"loss": named.pop("total"), **named}


class TrainingPass:
    """The network and all that its losses need.

    Args:
        model: the network, on its final device and in its final dtype.
        own: configuration.
        table: outlines of all training objects.
        dtype: of the network.

    Attributes:
        choices: operation to the implementation that was chosen.

    Raises:
        UnsupportedImplementation: see :func:`common.ops.implementation.select`.
    """

    def __init__(self, model: MaskRCNN, own: MaskRCNNConfig, table: PolygonTable, dtype: torch.dtype) -> None:
        facts, device = own.facts, table.xy.device
        self._model, self._facts, self._table = model, facts, table
        self._anchors = {
            shape: [level_A4.to(device) for level_A4 in anchors(facts, shape)] for shape in own.reader.shapes
        }
        self._overlap = own.model.overlap
        self._rpn_branch, self._box_branch = Branch(device, self._overlap), Branch(device, self._overlap)

        with asked_for("model.anchor_matching", own.model.anchor_matching):
            matching = own.model.anchor_matching
        self._propose = Proposer(facts, own.hparams, own.model.suppression, device)
        self._rpn_targets = RpnTargets(facts, matching, own.model.sampling, device)
        self._roi_targets = RoiTargets(facts, matching, own.model.sampling, device)
        with asked_for("model.roi_align", own.model.roi_align):
            request = OperationRequest(device, dtype, {"channels": facts.pyramid_channels})
            roi_align = select(ROI_ALIGN, own.model.roi_align, request)
        with asked_for("model.mask_targets", own.model.mask_targets):
            request = OperationRequest(device, torch.uint8, {"size": facts.mask_size})
            mask_targets = select(MASK_TARGETS, own.model.mask_targets, request)
        with asked_for("model.mask_loss", own.model.mask_loss):
            request = OperationRequest(device, dtype, {"classes": facts.classes + 1})
            mask_loss = select(MASK_LOSS, own.model.mask_loss, request)
        self._roi_align, self._mask_targets, self._mask_loss = (
            chosen.function for chosen in (roi_align, mask_targets, mask_loss)
        )
        self.choices = {
            "roi_align": roi_align.name,
            "mask_targets": mask_targets.name,
            "mask_loss": mask_loss.name,
        }

    def __call__(self, tensors: Mapping[str, Tensor], key: Shape, scale: Tensor) -> DetectionLosses:
        """The losses of a micro-batch.

        Args:
            tensors: ``image`` (B, 3, H, W); ``size`` (B, 2), heights and widths of the pictures in it; ``boxes``
                (B, M, 4), ``label`` (B, M) and ``count`` (B,), their objects; ``object`` (B,), the row of each
                picture's first object in the table; ``transform`` (B, 4), see ``ops.mask_targets``; ``real`` (B,),
                whether a slot holds a picture that counts; ``seed`` (1,), of what is drawn.
            key: H and W.
            scale: what the sum of the losses is multiplied by before it is differentiated, 0-d.
        """
        model, facts = self._model, self._facts
        objects = {name: tensors[name] for name in ("boxes", "label", "count", "size", "real", "seed")}
        levels = model.pyramid(tensors["image"])
        rpn = self._part(self._rpn_branch, levels)
        with rpn.beside():
            outputs = model.propose(rpn.inputs)
        rpn.branch.join()
        with rpn.beside():
            sample = self._rpn_targets(...)
            rpn.finish(rpn_losses(outputs, sample, facts.rpn_beta), model.rpn.parameters(), scale)
        ...
