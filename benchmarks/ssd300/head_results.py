"""Layout of a head's output, and concatenation of the outputs of all levels.

Legend: N pictures, H W height and width of a level, C channels, A default boxes of all levels, K classes with
background.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable


@dataclass(frozen=True)
class HeadChannels:
    """Channels of a level's head: logits, then offsets, then possibly padding.

    Attributes:
        kinds: default boxes per cell.
        classes: number of classes K, with background.
    """

    kinds: int
    classes: int

    @property
    def logits(self) -> int:
        """Number of channels of the logits."""
        return self.kinds * self.classes

    @property
    def offsets(self) -> int:
        """Number of channels of the offsets."""
        return self.kinds * 4


def parts(head: HeadChannels, y_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a head's output: logits (N, H, W, kinds, K) and offsets (N, H, W, kinds, 4)."""
    y_NHWC = y_NCHW.permute(0, 2, 3, 1)
    of_classes = y_NHWC[..., : head.logits].unflatten(3, (head.kinds, head.classes))
    of_boxes = y_NHWC[..., head.logits : head.logits + head.offsets].unflatten(3, (head.kinds, 4))
    return of_classes, of_boxes


class Joined(Function):
    """Concatenates the levels to logits (N, A, K) and offsets (N, A, 4), with one copy per value in each direction.

    Arguments of ``apply``: the channels of the heads, then their outputs.
    """

    @staticmethod
    def forward(ctx: Any, channels: Sequence[HeadChannels], *results: Tensor) -> tuple[Tensor, Tensor]:
        ctx.channels, ctx.shapes = channels, [y_NCHW.shape for y_NCHW in results]
        ctx.boxes = [head.kinds * y_NCHW[0, 0].numel() for head, y_NCHW in zip(channels, results, strict=True)]
        shape = len(results[0]), sum(ctx.boxes)
        logits_NAK, offsets_NA4 = (results[0].new_empty((*shape, width)) for width in (channels[0].classes, 4))
        levels = zip(channels, results, logits_NAK.split(ctx.boxes, 1), offsets_NA4.split(ctx.boxes, 1), strict=True)
        for head, y_NCHW, *joined in levels:
            for part, target in zip(parts(head, y_NCHW), joined, strict=True):
                target.view(part.shape).copy_(part)
        return logits_NAK, offsets_NA4

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_results = []
        split = (gradient.contiguous().split(ctx.boxes, 1) for gradient in gradients)
        for head, (pictures, channels, height, width), *joined in zip(ctx.channels, ctx.shapes, *split, strict=True):
            d_y_NCHW = gradients[0].new_empty((pictures, height, width, channels)).permute(0, 3, 1, 2)
            d_y_NCHW[:, head.logits + head.offsets :].zero_()
            for part, source in zip(parts(head, d_y_NCHW), joined, strict=True):
                part.copy_(source.view(part.shape))
            d_results.append(d_y_NCHW)
        return None, *d_results
