"""RetinaNet's targets at every anchor, and its loss: focal loss of classes and L1 loss of offsets, over all levels.

Lin et al., arXiv:1708.02002, section 3, with L1 instead of smooth L1, as in the reference. The sums of a picture are
divided by its number of anchors with a box; the loss is the mean over the batch.

Shapes: B or N pictures, M boxes at most, A anchors of a level or of all, K classes, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.retinanet.config import Facts
from benchmarks.retinanet.model import HeadOutput
from benchmarks.retinanet.ops.focal_loss import FOCAL_LOSS
from common.detection.coding import BoxCoding, rows_of
from common.ops.anchor_matching import ANCHOR_MATCHING, BELOW, BETWEEN, MatchingRule
from common.ops.operation import OperationRequest, select

CODING = BoxCoding(weights=(1.0, 1.0, 1.0, 1.0), most_growth=1000 / 16)

BACKGROUND, IGNORED = BELOW, BETWEEN
"""Values that replace a class."""


class AnchorTargets:
    """Computes targets from boxes, on the device and with fixed shapes.

    Args:
        anchors_A4: corners x1, y1, x2, y2 in px of the resized picture.

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
            picture in the loss, 1 / (B * number of anchors with a box, at least 1).
        """
        row_BA = self._match(self._anchors_A4, boxes_BM4, count_B, self._rule)
        has_box_BA = row_BA >= 0
        known_BA = row_BA.clamp(min=0)
        class_BA = torch.where(has_box_BA, label_BM.gather(1, known_BA), row_BA)
        box_BA4 = rows_of(boxes_BM4, known_BA)
        offsets_BA4 = torch.where(has_box_BA.unsqueeze(2), CODING.encode(box_BA4, self._anchors_A4), 0.0)
        weight_B = 1.0 / (has_box_BA.sum(1).clamp(min=1) * len(row_BA))
        return {"class": class_BA.int(), "offsets": offsets_BA4.float(), "weight": weight_B.float()}


@dataclass(frozen=True)
class DetectionLosses:
    """Both parts of the loss, 0-d, in fp32 (fp64 for fp64 outputs)."""

    classes: Tensor
    boxes: Tensor


class DetectionLoss:
    """Computes both parts of the loss.

    Args:
        classes: number of classes K.
        alpha, gamma: parameters of the focal loss.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(
        self,
        classes: int,
        alpha: float,
        gamma: float,
        implementations: Mapping[str, str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._alpha, self._gamma = alpha, gamma
        request = OperationRequest(device, dtype, {"classes": classes})
        self.choice, self._focal_loss = select(implementations, "focal_loss", FOCAL_LOSS, request)

    def __call__(
        self,
        levels: Sequence[HeadOutput],
        logit_bias_C: Tensor,
        class_NA: Tensor,
        offsets_NA4: Tensor,
        weight_N: Tensor,
        loss_scale: Tensor,
    ) -> DetectionLosses:
        """Return the losses of a micro-batch.

        Args:
            levels: outputs of the heads, finest level first.
            logit_bias_C: bias that is added to the logits.
            loss_scale: 0-d factor by which the caller multiplies the loss before backward. Without it, gradients of
                logits are too small for fp16.
        """
        classes = [
            self._focal_loss(
                level.logits_NCHW, logit_bias_C, class_NA[:, part], weight_N, self._alpha, self._gamma, loss_scale
            )
            for level, part in zip(levels, _parts(levels), strict=True)
        ]
        boxes = OffsetLoss.apply(class_NA, offsets_NA4, weight_N, *(level.offsets_NCHW for level in levels))
        return DetectionLosses(torch.stack(classes).sum(), boxes)


class OffsetLoss(torch.autograd.Function):
    """Weighted sum of ``|offset - target|`` over the anchors that have a box, for all levels at once."""

    @staticmethod
    def forward(ctx: Any, class_NA: Tensor, target_NA4: Tensor, weight_N: Tensor, *levels_NCHW: Tensor) -> Tensor:
        # There are few offsets, so that the number of kernels determines the cost: all levels are concatenated, and
        # only the slope, which the forward pass computes, is kept.
        rows_NA4 = [
            level_NCHW.permute(0, 2, 3, 1).reshape(len(level_NCHW), -1, target_NA4.shape[2])
            for level_NCHW in levels_NCHW
        ]
        has_box_NA1 = (class_NA >= 0).unsqueeze(2)
        # The difference has the wider dtype, which is that of the targets.
        difference_NA4 = torch.where(has_box_NA1, torch.cat(rows_NA4, 1) - target_NA4, 0.0)
        slope_NA4 = difference_NA4.sign().mul_(weight_N[:, None, None])
        ctx.save_for_backward(slope_NA4)
        ctx.anchors = [rows.shape[1] for rows in rows_NA4]
        ctx.shapes, ctx.dtype = [level_NCHW.shape for level_NCHW in levels_NCHW], levels_NCHW[0].dtype
        return difference_NA4.mul_(slope_NA4).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slope_NA4,) = ctx.saved_tensors
        d_levels = []
        for part_NA4, (pictures, channels, height, width) in zip(
            slope_NA4.split(ctx.anchors, 1), ctx.shapes, strict=True
        ):
            part_NCHW = part_NA4.view(pictures, height, width, channels).permute(0, 3, 1, 2)
            d_level_NCHW = torch.empty_like(part_NCHW, dtype=ctx.dtype, memory_format=torch.channels_last)
            d_levels.append(torch.mul(part_NCHW, gradients[0], out=d_level_NCHW))
        return None, None, None, *d_levels


def _parts(levels: Sequence[HeadOutput]) -> Iterator[slice]:
    """Yield the range of each level's anchors among all anchors."""
    start = 0
    for level in levels:
        anchors = level.flat()[0].shape[1]
        yield slice(start, start + anchors)
        start += anchors
