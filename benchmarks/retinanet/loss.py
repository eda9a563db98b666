"""RetinaNet's loss: focal loss of the classes and L1 of the offsets, picture by picture, over all levels.

Lin et al., arXiv:1708.02002, section 3; the reference takes L1 where the paper has its smooth form. Each picture's sums
are divided by its anchors with a box, and the mean over the batch is taken.

Shapes: N pictures, A anchors of a level or of all, K classes, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.retinanet.model import HeadOutput
from benchmarks.retinanet.ops import focal_loss
from common.ops.implementation import OperationRequest, select
from common.ops.triton_support import widen


@dataclass(frozen=True)
class DetectionLosses:
    """The two parts, 0-d; fp32, fp64 of fp64."""

    classes: Tensor
    boxes: Tensor


class DetectionLoss:
    """Both parts of the loss.

    Args:
        classes: K.
        alpha, gamma: of the focal loss.
        implementation: of the focal loss, by name.
        device, dtype: of the network's outputs.

    Raises:
        UnsupportedImplementation: see :func:`common.ops.implementation.select`.
    """

    def __init__(
        self,
        classes: int,
        alpha: float,
        gamma: float,
        implementation: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._alpha, self._gamma = alpha, gamma
        request = OperationRequest(device, dtype, {"classes": classes})
        self._focal_loss = select(focal_loss.IMPLEMENTATIONS, implementation, request)

    @property
    def choice(self) -> str:
        """The implementation of the focal loss."""
        return self._focal_loss.name

    def __call__(
        self,
        levels: Sequence[HeadOutput],
        logit_bias_C: Tensor,
        class_NA: Tensor,
        offsets_NA4: Tensor,
        weight_N: Tensor,
        loss_scale: Tensor,
    ) -> DetectionLosses:
        """The losses of a micro-batch.

        Args:
            levels: what the heads say, finest level first.
            logit_bias_C: what is to be added to the logits.
            class_NA, offsets_NA4, weight_N: see :class:`benchmarks.retinanet.targets.AnchorTargets`.
            loss_scale: what the sum of the losses is multiplied by before it is differentiated, 0-d: gradients of the
                logits are too small for fp16 without it.
        """
        classes, boxes = [], []
        for level, part in zip(levels, _parts(levels), strict=True):
            class_part_NA, offsets_part_NA4 = class_NA[:, part], offsets_NA4[:, part]
            classes.append(
                self._focal_loss.function(
                    level.logits_NCHW,
                    logit_bias_C,
                    class_part_NA,
                    weight_N,
                    self._alpha,
                    self._gamma,
                    loss_scale,
                )
            )
            _, offsets_level_NA4 = level.flat()
            difference_NA4 = widen(offsets_level_NA4) - offsets_part_NA4
            counts_NA1 = (class_part_NA >= 0).unsqueeze(2)
            boxes.append(torch.where(counts_NA1, difference_NA4.abs(), 0.0).sum((1, 2)))
        return DetectionLosses(torch.stack(classes).sum(), (torch.stack(boxes).sum(0) * weight_N).sum())


def _parts(levels: Sequence[HeadOutput]) -> Iterator[slice]:
    """Where the anchors of each level stand among all."""
    start = 0
    for level in levels:
        anchors = level.flat()[0].shape[1]
        yield slice(start, start + anchors)
        start += anchors
