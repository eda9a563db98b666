"""RetinaNet (Lin et al., arXiv:1708.02002): ResNeXt trunk with frozen batch norm, feature pyramid, and two heads.

Parameters are named as in the reference. All levels share the weights of the heads. In channels_last memory, the
output of a head's last convolution already has the layout (anchors, classes), so that it is not copied.

Anchors are those of the reference (section 4). Every cell of the five levels has nine anchors: three ratios, each in
three sizes. Corners are rounded to whole pixels around 0 and then shifted by (j, i) strides for the cell in row i and
column j, without half a stride. The stride is the picture's size divided by that of the level, rounded down: 8, 16,
32, 61 and 114 for 800 px.

Shapes: N images, C channels, H height, W width, A anchors of a level, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.ranges import AtLeast, NotNegative, ShareAboveZero
from common.nn.choice import choose_layers
from common.nn.convolution import LayerFlops, cast_weights, convolution_flops
from common.nn.feature_pyramid import FeaturePyramid
from common.nn.fused_convolution import FusedConv2d
from common.nn.resnet import FrozenNorm, ResNetShape, ResNetTrunk, draw_weights

SIZES = tuple(tuple(int(base * 2 ** (third / 3)) for third in range(3)) for base in (32, 64, 128, 256, 512))
"""Square root of the anchors' areas in px, per level from the finest."""

RATIOS = (0.5, 1.0, 2.0)
"""Ratios of height to width."""

ANCHORS_PER_CELL = len(RATIOS) * 3
FINEST_HALVINGS = 3
"""How often the picture's size is halved for the finest level."""


def level_sizes(image_size: int) -> tuple[int, ...]:
    """Return the size (height and width) of each level in cells, from the finest.

    Args:
        image_size: height and width of the picture, px.
    """
    sizes = [image_size]
    for _ in range(FINEST_HALVINGS + len(SIZES) - 1):
        sizes.append((sizes[-1] + 1) // 2)
    return tuple(sizes[FINEST_HALVINGS:])


def anchors(image_size: int) -> Tensor:
    """Return all anchors of a picture, (A, 4) fp32, as corners x1, y1, x2, y2 in px, not clipped to the picture.

    The order is that of the network's outputs: level from the finest, row, column, ratio, size.

    Args:
        image_size: height and width of the picture, px.
    """
    levels = []
    for size, sides in zip(level_sizes(image_size), SIZES, strict=True):
        corners_A4 = torch.tensor([_first_anchor(side, ratio) for ratio in RATIOS for side in sides])
        start = torch.arange(size, dtype=torch.float32) * (image_size // size)
        y, x = torch.meshgrid(start, start, indexing="ij")
        levels.append((torch.stack([x, y, x, y], -1)[:, :, None] + corners_A4).flatten(0, 2))
    return torch.cat(levels)


def _first_anchor(side: int, ratio: float) -> list[float]:
    """Return corners around 0. Halves are rounded to even, as in PyTorch."""
    width, height = side / math.sqrt(ratio), side * math.sqrt(ratio)
    return [float(round(corner)) for corner in (-width / 2, -height / 2, width / 2, height / 2)]


BOX = 4
"""Coordinates of a box."""

HEAD_STD = 0.01
"""Standard deviation of the initial weights of the heads."""

PYRAMID_STAGES = (2, 3, 4)
"""Stages of the trunk whose outputs the pyramid uses."""


@dataclass(frozen=True)
class Architecture:
    """Shape of the network.

    Attributes:
        classes: number of classes K, without background.
        norm_epsilon: added to the variance in every frozen batch norm.
        prior: initial probability of every class.
        layers: blocks in the four stages of the trunk.
        width: channels of the trunk's first convolution.
        groups: groups of the 3x3 convolutions in the trunk's blocks.
        width_per_group: channels per group in the first stage.
        trained_stages: number of trained stages, counted from the last. Earlier stages and all batch norms are frozen.
        pyramid_channels: channels of the pyramid's levels and of the heads.
        head_convolutions: 3x3 convolutions of a head before its last convolution.
    """

    classes: Annotated[int, AtLeast(1)]
    norm_epsilon: Annotated[float, NotNegative]
    prior: Annotated[float, ShareAboveZero]
    layers: tuple[int, int, int, int]
    width: Annotated[int, AtLeast(1, "at least 1 channel")]
    groups: Annotated[int, AtLeast(1)]
    width_per_group: Annotated[int, AtLeast(1)]
    trained_stages: Annotated[int, AtLeast(0)]
    pyramid_channels: Annotated[int, AtLeast(1)]
    head_convolutions: Annotated[int, AtLeast(0)]

    def trunk(self) -> ResNetShape:
        """Return the shape of the trunk.

        Raises:
            ConfigError: ``trained_stages`` is too large for a trunk with a frozen start.
        """
        norm = FrozenNorm(self.norm_epsilon, self.trained_stages)
        return ResNetShape(
            self.layers,
            self.width,
            bottleneck=True,
            norm=norm,
            groups=self.groups,
            width_per_group=self.width_per_group,
        )


class HeadOutput(NamedTuple):
    """Outputs of the heads for one level.

    Attributes:
        logits_NCHW: (N, anchors per cell * K, H, W) in channels_last memory, without the classifier's bias.
        offsets_NCHW: (N, anchors per cell * 4, H, W) in channels_last memory.
    """

    logits_NCHW: Tensor
    offsets_NCHW: Tensor

    def flat(self) -> tuple[Tensor, Tensor]:
        """Return views: logits (N, A, K), without the bias, and offsets (N, A, 4), in the order of the anchors."""
        cells = self.offsets_NCHW.shape[2] * self.offsets_NCHW.shape[3]
        images, anchors = self.offsets_NCHW.shape[0], cells * (self.offsets_NCHW.shape[1] // BOX)
        logits_NHWC, offsets_NHWC = (output.permute(0, 2, 3, 1) for output in self)
        return logits_NHWC.view(images, anchors, -1), offsets_NHWC.view(images, anchors, BOX)


class HiddenConvolutions(nn.ModuleDict):
    """3x3 convolutions with ReLU. Their names are even numbers, because the reference counts each ReLU as a layer."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__({str(2 * index): FusedConv2d(channels, channels, 3) for index in range(count)})

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Map (N, C, H, W)."""
        for convolution in self.values():
            x_NCHW = convolution(x_NCHW, relu=True)
        return x_NCHW


class ClassificationHead(nn.Module):
    """Classification head: logits of every class at every anchor."""

    def __init__(self, channels: int, convolutions: int, classes: int) -> None:
        super().__init__()
        self.conv = HiddenConvolutions(channels, convolutions)
        self.cls_logits = nn.Conv2d(channels, ANCHORS_PER_CELL * classes, 3, padding=1)

    def forward(self, level_NCHW: Tensor) -> Tensor:
        """Return logits (N, anchors per cell * K, H, W) without the bias, which the loss adds, with its gradient."""
        return F.conv2d(self.conv(level_NCHW), self.cls_logits.weight, padding=1)


class RegressionHead(nn.Module):
    """Regression head: box offsets for every anchor."""

    def __init__(self, channels: int, convolutions: int) -> None:
        super().__init__()
        self.conv = HiddenConvolutions(channels, convolutions)
        self.bbox_reg = FusedConv2d(channels, ANCHORS_PER_CELL * BOX, 3)

    def forward(self, level_NCHW: Tensor) -> Tensor:
        """Return the offsets (N, anchors per cell * 4, H, W)."""
        offsets_NCHW: Tensor = self.bbox_reg(self.conv(level_NCHW))
        return offsets_NCHW


class Backbone(nn.Module):
    """Trunk and feature pyramid."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.body = ResNetTrunk(architecture.trunk())
        stages = [self.body.shape.out_channels[number - 1] for number in PYRAMID_STAGES]
        self.fpn = FeaturePyramid(stages, architecture.pyramid_channels, "convolutions")

    def forward(self, image_NCHW: Tensor) -> list[Tensor]:
        """Return the levels of the pyramid, (N, C, H', W') each, from the finest."""
        levels: list[Tensor] = self.fpn(self.body.features(image_NCHW, PYRAMID_STAGES))
        return levels


class Heads(nn.Module):
    """Classification head and regression head."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        channels, convolutions = architecture.pyramid_channels, architecture.head_convolutions
        self.classification_head = ClassificationHead(channels, convolutions, architecture.classes)
        self.regression_head = RegressionHead(channels, convolutions)

    def forward(self, level_NCHW: Tensor) -> HeadOutput:
        """Map one level of the pyramid to the outputs of both heads."""
        outputs = self.classification_head(level_NCHW), self.regression_head(level_NCHW)
        return HeadOutput(*(output.contiguous(memory_format=torch.channels_last) for output in outputs))


class RetinaNet(nn.Module):
    """RetinaNet with trunk, pyramid and heads.

    Args:
        generator: CPU generator for all initial weights. :func:`common.nn.backbone_file.load_backbone` can replace
            those of ``backbone.body`` by the weights of a file.

    Raises:
        ConfigError: see :class:`common.nn.resnet.ResNetShape`.
    """

    def __init__(self, architecture: Architecture, generator: torch.Generator) -> None:
        super().__init__()
        self.architecture = architecture
        self.backbone = Backbone(architecture)
        self.head = Heads(architecture)
        draw_weights(self.backbone.body, generator)
        self.backbone.fpn.draw_weights(generator)
        self._draw_heads(generator)
        self.to(memory_format=torch.channels_last)

    @torch.no_grad()
    def _draw_heads(self, generator: torch.Generator) -> None:
        """Draw weights from N(0, 0.01). Biases are 0, except the classifier's, which gives every class its prior."""
        for module in self.head.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.normal_(0.0, HEAD_STD, generator=generator)
                assert module.bias is not None
                module.bias.zero_()
        prior = self.architecture.prior
        self.logit_bias.fill_(math.log(prior / (1 - prior)))

    @property
    def logit_bias(self) -> nn.Parameter:
        """Bias of the classifier, (anchors per cell * K,), which the logits of :meth:`forward` do not include."""
        return self.get_parameter("head.classification_head.cls_logits.bias")

    def cast(self, dtype: torch.dtype) -> RetinaNet:
        """Convert the convolutions' parameters to ``dtype``, see :func:`common.nn.convolution.cast_weights`."""
        cast_weights(self, dtype)
        return self

    def choose_implementations(self, requested: Mapping[str, str]) -> dict[str, str]:
        """Choose the implementation of ``convolution``. Call this after :meth:`cast`, on the final device.

        Args:
            requested: configuration ``model.implementations``.

        Returns:
            Name of the operation to the implementations chosen.

        Raises:
            UnsupportedImplementation: see :func:`common.nn.choice.choose_layers`.
        """
        return choose_layers(self, {"convolution": FusedConv2d}, requested, self.logit_bias.dtype)

    def forward(self, image_NCHW: Tensor) -> list[HeadOutput]:
        """Return the head outputs of the levels P3 to P7, in the dtype of the weights.

        Args:
            image_NCHW: normalised images in the dtype of the weights, 3 channels.
        """
        return [self.head(level_NCHW) for level_NCHW in self.backbone(image_NCHW)]

    def flops(self, image_size: int) -> list[LayerFlops]:
        """Return the FLOPs per image of every convolution, with one entry per level that it runs on.

        Args:
            image_size: height and width of the image.
        """
        body, fpn = self.backbone.body, self.backbone.fpn
        layers, sizes = body.flops((image_size, image_size))
        trained = [number >= body.shape.first_trained_stage for number in PYRAMID_STAGES]
        more, levels = fpn.flops([sizes[number - 1] for number in PYRAMID_STAGES], trained)
        layers += more
        for name, module in self.head.named_modules():
            if isinstance(module, nn.Conv2d):
                layers += [convolution_flops(name, module, size) for size in levels]
        return layers

    def sample_flops(self, image_size: int) -> float:
        """Return the model FLOPs (2 per multiply-add) to train on one image: forward pass and required gradients."""
        return sum(layer.training for layer in self.flops(image_size))
