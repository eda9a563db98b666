"""SSD300 with a ResNet-34 as backbone, and its loss with hard-negative mining.

Liu et al., arXiv:1512.02325, with the changes of the MLPerf reference: the backbone ends with the third stage of
ResNet-34, whose stride is 1, and its batch norms are trained. ``backbone.*`` is named as in torchvision's
``resnet34``. Each level has one convolution for classes and offsets. Its channels are (default boxes per cell,
classes), then (default boxes per cell, 4), so that in channels_last memory the output has the order of
:mod:`benchmarks.ssd300.targets`. The loss has fixed shapes and no indexing that depends on values, for captured graphs.

Shapes: N pictures, C channels, H height, W width, A default boxes, K classes with background.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from benchmarks.ssd300.config import Facts
from benchmarks.ssd300.targets import BACKGROUND
from common.nn.batch_norm import BatchNorm2d
from common.nn.choice import choose_layers
from common.nn.convolution import Conv2d, cast_weights, convolution_flops, result_size
from common.nn.fused_convolution import FusedConv2d
from common.nn.resnet import PADDED_CHANNELS, ResNetShape, ResNetTrunk, TrainedNorm, draw_weights


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


LAST_STAGE = 3
"""Last stage of the backbone. Its output is the first level."""
CHANNEL_MULTIPLE = 8
"""Tensor cores need a multiple of this number as channels of a half-precision convolution."""


class Predictions(NamedTuple):
    """Outputs of the network for every default box.

    Attributes:
        logits: (N, A, K), background first.
        offsets: (N, A, 4).
    """

    logits: Tensor
    offsets: Tensor


class UnpaddedConv2d(FusedConv2d):
    """A 3x3 convolution with stride 1 and without padding."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 3)
        self.padding = (0, 0)

    def run(
        self, x_NCHW: Tensor, weight: Tensor, bias_C: Tensor, relu: bool, residual_NCHW: Tensor | None = None
    ) -> Tensor:
        """Return the convolution of the given weight and bias.

        See :meth:`common.nn.fused_convolution.FusedConv2d.run`.
        """
        y_NCHW: Tensor = self._conv_bias_relu.function(x_NCHW, weight, bias_C, 1, 0, 1, relu, residual_NCHW)
        return y_NCHW


class ExtraBlock(nn.Module):
    """A 1x1 and a 3x3 convolution, each with bias and ReLU. The second one reduces the size.

    Args:
        between: channels after the 1x1 convolution.
        stride: stride of the 3x3 convolution. With stride 1, it has no padding.
    """

    def __init__(self, in_channels: int, between: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = FusedConv2d(in_channels, between, 1)
        self.conv2 = UnpaddedConv2d(between, out_channels) if stride == 1 else FusedConv2d(between, out_channels, 3, 2)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Map (N, C, H, W) to the next level."""
        y_NCHW: Tensor = self.conv2(self.conv1(x_NCHW, relu=True), relu=True)
        return y_NCHW


class Head(FusedConv2d):
    """Classes and offsets of a level from one 3x3 convolution, whose channels are padded with zeros at run time."""

    def __init__(self, in_channels: int, channels: HeadChannels) -> None:
        super().__init__(in_channels, channels.logits + channels.offsets, 3)
        self.channels = channels

    def forward(self, x_NCHW: Tensor, relu: bool = False, residual_NCHW: Tensor | None = None) -> Tensor:
        """Map (N, C, H, W) to (N, C', H, W), where C' is a multiple of 8 and channels of padding are zero."""
        assert self.bias is not None
        padding = -self.out_channels % CHANNEL_MULTIPLE
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, 0, 0, padding)).contiguous(memory_format=torch.channels_last)
        return self.run(x_NCHW, weight, F.pad(self.bias, (0, padding)), relu, residual_NCHW)


class SSD300(nn.Module):
    """SSD300 with backbone, extra blocks and heads.

    Args:
        generator: CPU generator that draws the initial weights.
    """

    def __init__(self, facts: Facts, generator: torch.Generator) -> None:
        super().__init__()
        self.classes = facts.classes + 1
        norm = TrainedNorm(facts.bn_epsilon, facts.bn_momentum)
        shape = ResNetShape(
            facts.layers, facts.width, bottleneck=False, norm=norm, strides=(1, 2, 1), input_channels=PADDED_CHANNELS
        )
        self.backbone = ResNetTrunk(shape)
        channels = [shape.out_channels[-1]]
        self.extras = nn.ModuleList()
        for between, out_channels, stride in facts.extras:
            self.extras.append(ExtraBlock(channels[-1], between, out_channels, stride))
            channels.append(out_channels)
        self._channels = [HeadChannels(kinds, self.classes) for kinds in facts.boxes_per_cell]
        self.heads = nn.ModuleList(Head(*each) for each in zip(channels, self._channels, strict=True))
        draw_weights(self.backbone, generator)
        self._draw(generator)
        self.to(memory_format=torch.channels_last)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        """Draw weights of extras and heads Glorot-uniformly, classes and offsets separately; biases as in PyTorch."""
        for module in [*self.extras.modules(), *self.heads.modules()]:
            if not isinstance(module, FusedConv2d):
                continue
            assert module.bias is not None
            parts = [module.weight]
            if isinstance(module, Head):
                parts = list(module.weight.split([module.channels.logits, module.channels.offsets]))
            for weight in parts:
                nn.init.xavier_uniform_(weight, generator=generator)
            bound = 1 / math.sqrt(module.weight[0].numel())
            module.bias.uniform_(-bound, bound, generator=generator)

    def cast(self, dtype: torch.dtype) -> SSD300:
        """Convert the weights of the convolutions to ``dtype``, which the activations then have too.

        Batch norms stay fp32, unless ``dtype`` is fp64. Replaces the data of the parameters: call it before an
        optimizer is created.
        """
        cast_weights(self, dtype)
        return self

    def choose_implementations(self, requested: Mapping[str, str]) -> dict[str, str]:
        """Choose implementations of batch norms and convolutions. Call this after :meth:`cast`, on the final device.

        Args:
            requested: configuration ``model.implementations``.

        Returns:
            Name of the operation to the implementations chosen.

        Raises:
            UnsupportedImplementation: see :func:`common.nn.choice.choose_layers`.
        """
        kinds = {"batch_norm": BatchNorm2d, "convolution_moments": Conv2d, "convolution": FusedConv2d}
        return choose_layers(self, kinds, requested, self.backbone.conv1.weight.dtype)

    def levels(self, image_NCHW: Tensor) -> list[Tensor]:
        """Return the feature maps, (N, C, H, W) each, in which boxes are predicted."""
        levels = self.backbone.features(image_NCHW, [LAST_STAGE])
        for extra in self.extras:
            levels.append(extra(levels[-1]))
        return levels

    def forward(self, image_NCHW: Tensor) -> Predictions:
        """Predict classes and offsets in the dtype of the weights.

        Args:
            image_NCHW: normalised pictures in the dtype of the weights. C is 3, or 4 with zeros in the fourth channel.
        """
        results = [head(level) for head, level in zip(self.heads, self.levels(image_NCHW), strict=True)]
        return Predictions(*Joined.apply(self._channels, *results))

    def sample_flops(self, image_size: int) -> float:
        """Return the model FLOPs (2 per multiply-add) to train on one picture: forward pass and all gradients."""
        layers, sizes = self.backbone.flops((image_size, image_size))
        size, level_sizes = sizes[-1], [sizes[-1]]
        for extra in self.extras:
            assert isinstance(extra, ExtraBlock)
            layers.append(convolution_flops("conv1", extra.conv1, size))
            layers.append(convolution_flops("conv2", extra.conv2, size))
            size = result_size(extra.conv2, size)
            level_sizes.append(size)
        for head, size in zip(self.heads, level_sizes, strict=True):
            assert isinstance(head, Head)
            layers.append(convolution_flops("head", head, size))
        return sum(layer.training for layer in layers)


@dataclass(frozen=True)
class DetectionLosses:
    """Means over the pictures, 0-d, of the loss and its two parts."""

    total: Tensor
    boxes: Tensor
    classes: Tensor


def multibox_loss(
    logits_NAK: Tensor,
    offsets_NA4: Tensor,
    class_NA: Tensor,
    target_NA4: Tensor,
    negatives: int,
) -> DetectionLosses:
    """Return smooth L1 of the positives' offsets plus cross-entropy of positives and hard negatives, per positive.

    The loss of a picture is divided by its number of positives, which are default boxes with a matched box. Hard
    negatives are the ``negatives`` times as many negatives with the largest cross-entropy, the first of equals. A
    picture without positives adds 0 to the mean over the pictures.

    Args:
        logits_NAK: predicted logits, background first. Arithmetic is fp32, or fp64 for fp64 logits.
        offsets_NA4: predicted offsets.
        class_NA: target classes, int64; 0 is background.
        target_NA4: target offsets; those of background are ignored.
        negatives: hard negatives per positive.
    """
    dtype = torch.promote_types(logits_NAK.dtype, torch.float32)
    entropy_NA = -F.log_softmax(logits_NAK, 2, dtype=dtype).gather(2, class_NA.unsqueeze(2)).squeeze(2)
    positive_NA = class_NA != BACKGROUND
    positives_N = positive_NA.sum(1)
    counts_NA = positive_NA | _hardest(entropy_NA, positive_NA, negatives * positives_N)
    classes_N = torch.where(counts_NA, entropy_NA, 0.0).sum(1)

    distance_NA = F.smooth_l1_loss(offsets_NA4.to(dtype), target_NA4.to(dtype), reduction="none").sum(2)
    boxes_N = torch.where(positive_NA, distance_NA, 0.0).sum(1)

    share_N = torch.where(positives_N > 0, positives_N.clamp(min=1).to(dtype).reciprocal(), 0.0)
    boxes, found = (boxes_N * share_N).mean(), (classes_N * share_N).mean()
    return DetectionLosses(boxes + found, boxes, found)


@torch.no_grad()
def _hardest(entropy_NA: Tensor, positive_NA: Tensor, count_N: Tensor) -> Tensor:
    """Return (N, A) bool: the ``count_N`` negatives of each picture with the largest cross-entropy."""
    order_NA = entropy_NA.masked_fill(positive_NA, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    position_A = torch.arange(order_NA.shape[1], device=order_NA.device)
    rank_NA = torch.empty_like(order_NA).scatter_(1, order_NA, position_A.expand_as(order_NA))
    return (rank_NA < count_N.unsqueeze(1)) & ~positive_NA
