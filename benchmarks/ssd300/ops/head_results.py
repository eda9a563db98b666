"""What a level's head gives, and the results of all levels behind one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable


@dataclass(frozen=True)
class HeadChannels:
    """The channels of a level's head; padding may follow.

    Attributes:
        kinds: default boxes of a cell.
        classes: K.
    """

    kinds: int
    classes: int

    @property
    def logits(self) -> int:
        """Channels of the classes, which come first."""
        return self.kinds * self.classes

    @property
    def offsets(self) -> int:
        """Channels of the boxes, which follow."""
        return self.kinds * 4


def parts(head: HeadChannels, y_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Views of classes and offsets, (N, H, W, kinds, K) and (N, H, W, kinds, 4), of a head's result."""
    y_NHWC = y_NCHW.permute(0, 2, 3, 1)
    of_classes = y_NHWC[..., : head.logits].unflatten(3, (head.kinds, head.classes))
    of_boxes = y_NHWC[..., head.logits : head.logits + head.offsets].unflatten(3, (head.kinds, 4))
    return of_classes, of_boxes


def boxes_of(channels: Sequence[HeadChannels], results: Sequence[Tensor]) -> list[int]:
    """Default boxes of each level."""
    return [head.kinds * y_NCHW[0, 0].numel() for head, y_NCHW in zip(channels, results, strict=True)]


def joined_offsets(channels: Sequence[HeadChannels], results: Sequence[Tensor]) -> Tensor:
    """(N, A, 4) of all levels; for who makes the gradient itself."""
    boxes = boxes_of(channels, results)
    offsets_NA4 = results[0].new_empty((len(results[0]), sum(boxes), 4))
    for head, y_NCHW, offsets in zip(channels, results, offsets_NA4.split(boxes, 1), strict=True):
        of_boxes = parts(head, y_NCHW)[1]
        offsets.view(of_boxes.shape).copy_(of_boxes)
    return offsets_NA4


def empty_gradient(head: HeadChannels, y_NCHW: Tensor, d_offsets: Tensor) -> Tensor:
    """A gradient of a head's result in channels_last memory: offsets are there, padding is 0, classes are missing.

    Args:
        head: its channels.
        y_NCHW: the result.
        d_offsets: (N, boxes, 4) of this level.
    """
    pictures, channels, height, width = y_NCHW.shape
    d_y_NCHW = y_NCHW.new_empty((pictures, height, width, channels)).permute(0, 3, 1, 2)
    d_y_NCHW[:, head.logits + head.offsets :].zero_()
    of_boxes = parts(head, d_y_NCHW)[1]
    of_boxes.copy_(d_offsets.view(of_boxes.shape))
    return d_y_NCHW


class Joined(Function):
    """(N, A, K) logits and (N, A, 4) offsets of all levels, each value copied once forward and once backward.

    Called with the channels of each head and the heads' results.
    """

    @staticmethod
    def forward(ctx: Any, channels: Sequence[HeadChannels], *results: Tensor) -> tuple[Tensor, Tensor]:
        boxes = boxes_of(channels, results)
        logits_NAK = results[0].new_empty((len(results[0]), sum(boxes), channels[0].classes))
        for head, y_NCHW, logits in zip(channels, results, logits_NAK.split(boxes, 1), strict=True):
            of_classes = parts(head, y_NCHW)[0]
            logits.view(of_classes.shape).copy_(of_classes)
        ctx.channels, ctx.boxes, ctx.like = channels, boxes, [y_NCHW.detach() for y_NCHW in results]
        return logits_NAK, joined_offsets(channels, results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_results = []
        split = zip(*(gradient.contiguous().split(ctx.boxes, 1) for gradient in gradients), strict=True)
        for head, y_NCHW, (d_logits, d_offsets) in zip(ctx.channels, ctx.like, split, strict=True):
            d_y_NCHW = empty_gradient(head, y_NCHW, d_offsets)
            of_classes = parts(head, d_y_NCHW)[0]
            of_classes.copy_(d_logits.view(of_classes.shape))
            d_results.append(d_y_NCHW)
        return None, *d_results
