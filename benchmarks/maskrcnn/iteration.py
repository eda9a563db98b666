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
        model: the network, on its final device.
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
        self._overlap = own.model.overlap
        self._rpn_branch, self._box_branch = (Branch(device, self._overlap) for _ in range(2))

    def __call__(self, tensors: Mapping[str, Tensor], key: Hashable, scale: Tensor) -> DetectionLosses:
        """The losses of a micro-batch.

        Args:
            tensors: of the batch, see :mod:`benchmarks.maskrcnn.preparer`.
            key: its padded height and width.
            scale: what the sum of the losses is multiplied by before it is differentiated, 0-d.
        """
        levels = self._model.pyramid(tensors["image"])
        rpn_inputs = cut(levels) if self._overlap else levels
        with self._rpn_branch.beside():
            outputs = self._model.propose(rpn_inputs)
        self._rpn_branch.join()
        with self._rpn_branch.beside():
            ...
