"""Mask R-CNN (He et al., arXiv:1703.06870): ResNet trunk with frozen batch norm, feature pyramid, and three heads.

RoIAlign, which runs between :meth:`MaskRCNN.pyramid` and the heads, is not part of this module.

Shapes: N pictures, A anchors of a cell, R regions, C channels, H height, W width, S height and width of a region's
features, K classes without background.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.maskrcnn.config import Architecture
from benchmarks.maskrcnn.heads import BoxHead, MaskHead, RegionLinear, RpnHead
from benchmarks.maskrcnn.heads import RpnOutput as RpnOutput
from common.nn.choice import choose, choose_layers
from common.nn.convolution import LayerFlops, Size, cast_weights
from common.nn.feature_pyramid import FeaturePyramid
from common.nn.fused_convolution import FusedConv2d
from common.nn.resnet import FrozenNorm, ResNetShape, ResNetTrunk, draw_weights
from common.ops.operation import AUTO, REFERENCE

NORM_EPSILON = 0.0
"""Number added to the variance of frozen batch norms: 0, because the published weights have variance 1."""

PIXEL_SPREAD = 60.0
"""Approximate standard deviation of pixels, which are not normalised; the norm after a random stem divides by it."""


def trunk_shape(architecture: Architecture) -> ResNetShape:
    """Return the shape of the trunk.

    Raises:
        ConfigError: see :class:`common.nn.resnet.ResNetShape`.
    """
    norm = FrozenNorm(NORM_EPSILON, architecture.trained_stages)
    return ResNetShape(architecture.layers, architecture.width, bottleneck=True, norm=norm, stride_in_1x1=True)


class Backbone(nn.Module):
    """Trunk and feature pyramid."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.body = ResNetTrunk(trunk_shape(architecture))
        self.fpn = FeaturePyramid(self.body.shape.out_channels, architecture.pyramid_channels, "max_pool")

    def forward(self, image_NCHW: Tensor) -> list[Tensor]:
        """Return the levels of the pyramid, (N, C, H', W') each, from the finest."""
        levels: list[Tensor] = self.fpn(self.body.features(image_NCHW))
        return levels


class MaskRCNN(nn.Module):
    """Mask R-CNN with trunk, pyramid and heads.

    Args:
        generator: CPU generator for all initial weights. :func:`benchmarks.maskrcnn.caffe2_backbone.load_backbone` can
            replace those of ``backbone.body`` by the weights of a file.

    Attributes:
        box_head: maps (R, C, S, S) to class logits (R, K + 1), background first, and offsets (R, 4 (K + 1)).
        mask_head: maps (R, C, S, S) and the class of each region (R,) to the logits of this class (R, 2 S, 2 S).

    Raises:
        ConfigError: see :class:`common.nn.resnet.ResNetShape`.
    """

    def __init__(self, architecture: Architecture, generator: torch.Generator) -> None:
        super().__init__()
        self.architecture = architecture
        self.backbone = Backbone(architecture)
        self.rpn = RpnHead(architecture)
        self.box_head = BoxHead(architecture)
        self.mask_head = MaskHead(architecture)
        draw_weights(self.backbone.body, generator)
        nn.init.constant_(self.backbone.body.get_buffer("bn1.running_var"), PIXEL_SPREAD**2)
        self.backbone.fpn.draw_weights(generator)
        for head in (self.rpn, self.box_head, self.mask_head):
            head.draw_weights(generator)
        self.to(memory_format=torch.channels_last)

    def cast(self, dtype: torch.dtype) -> MaskRCNN:
        """Convert weights and biases to ``dtype``, see :func:`common.nn.convolution.cast_weights`."""
        cast_weights(self, dtype)
        return self

    def choose_implementations(self, requested: Mapping[str, str]) -> dict[str, str]:
        """Choose implementations of ``convolution`` and ``selected_logits``, on the final device, after :meth:`cast`.

        The hidden layers of the box head are linear. They use the reference if ``convolution`` does, and otherwise
        ``auto``.

        Args:
            requested: configuration ``model.implementations``.

        Returns:
            Name of the operation to the implementations chosen.

        Raises:
            UnsupportedImplementation: see :func:`common.nn.choice.choose_layers`.
        """
        dtype = self.mask_head.mask_fcn_logits.weight.dtype
        choose(self, RegionLinear, REFERENCE if requested.get("convolution") == REFERENCE else AUTO, dtype)
        return choose_layers(self, {"convolution": FusedConv2d, "selected_logits": MaskHead}, requested, dtype)

    def pyramid(self, image_NCHW: Tensor) -> list[Tensor]:
        """Return the levels P2 to P6, (N, C, H / stride, W / stride), in the dtype of the weights.

        Args:
            image_NCHW: blue, green and red minus their means, in the dtype of the weights. H and W are multiples of
                32.
        """
        levels: list[Tensor] = self.backbone(image_NCHW)
        return levels

    def propose(self, levels: list[Tensor]) -> list[RpnOutput]:
        """Return the outputs of the region proposal network for each level."""
        return [self.rpn(level_NCHW) for level_NCHW in levels]

    def flops(self, size: Size, boxes: int, masks: int) -> list[LayerFlops]:
        """Return the FLOPs of every layer for one picture, with one entry per level that it runs on.

        Names begin with the part: ``body``, ``fpn``, ``rpn``, ``box_head`` or ``mask_head``.

        Args:
            size: height and width of the padded picture.
            boxes, masks: regions per picture in the box head and in the mask head.
        """
        body = self.backbone.body
        layers, sizes = body.flops(size)
        trained = [number >= body.shape.first_trained_stage for number in range(1, len(sizes) + 1)]
        pyramid, levels = self.backbone.fpn.flops(sizes, trained)
        parts = {
            "body": layers,
            "fpn": pyramid,
            "rpn": self.rpn.flops(levels),
            "box_head": self.box_head.flops(boxes),
            "mask_head": self.mask_head.flops(masks),
        }
        return [
            LayerFlops(f"{part}.{layer.name}", layer.forward, layer.training)
            for part, found in parts.items()
            for layer in found
        ]

    def sample_flops(self, size: Size, boxes: int, masks: int) -> float:
        """Return the model FLOPs (2 per multiply-add) to train on one picture: forward pass and required gradients."""
        return sum(layer.training for layer in self.flops(size, boxes, masks))
