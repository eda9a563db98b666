"""torchvision's RetinaNet of the benchmark's shape, and its weights under the reference's names."""

from __future__ import annotations

import re

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from benchmarks.retinanet.model import Architecture

FROZEN = ("backbone.body.conv1.", "backbone.body.layer1.")


def build(architecture: Architecture, image_size: int) -> RetinaNet:
    """torchvision's network with random weights and statistics, three stages trained; its pictures are square.

    Its stem has 64 channels, and its heads four convolutions.
    """

    def norm(channels: int) -> nn.Module:
        return torchvision.ops.FrozenBatchNorm2d(channels, architecture.norm_epsilon)

    layers, groups, width = list(architecture.layers), architecture.groups, architecture.width_per_group
    body = ResNet(Bottleneck, layers, groups=groups, width_per_group=width, norm_layer=norm)
    channels = architecture.pyramid_channels
    stages, extra = {"layer2": "0", "layer3": "1", "layer4": "2"}, LastLevelP6P7(channels, channels)
    backbone = BackboneWithFPN(body, stages, [512, 1024, 2048], channels, extra_blocks=extra)
    network = RetinaNet(backbone, architecture.classes, min_size=image_size, max_size=image_size)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torchvision.ops.FrozenBatchNorm2d):
                for name, low, high in (("weight", 0.5, 1.0), ("bias", -0.3, 0.3), ("running_mean", -0.3, 0.3)):
                    getattr(module, name).uniform_(low, high)
                module.running_var.uniform_(0.8, 1.5)
        # behind layers of weights of 0.01, and beside biases of -4.6, the trunk's part would drown in rounding
        for parameter in network.head.parameters():
            parameter.normal_(0.0, 0.04)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return network


def reference_name(name: str) -> str:
    """The reference's name of a tensor of torchvision's network."""
    if name.startswith("head."):
        return re.sub(r"\.conv\.(\d)\.0\.", lambda match: f".conv.{2 * int(match[1])}.", name)
    return re.sub(r"(inner_blocks|layer_blocks)\.(\d)\.0\.", r"\1.\2.", name)


def reference_state(network: RetinaNet) -> dict[str, Tensor]:
    """Its tensors by the reference's names."""
    return {reference_name(name): value for name, value in network.state_dict().items()}


def outputs(network: RetinaNet, image_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (N, A, K) and offsets (N, A, 4) of all levels."""
    found = network.head(list(network.backbone(image_NCHW).values()))
    return found["cls_logits"], found["bbox_regression"]
