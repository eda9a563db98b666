"""torchvision's parts of Mask R-CNN in the benchmark's shape, and their tensors under our names and in our shapes."""

from __future__ import annotations

import re

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from benchmarks.maskrcnn.config import Architecture

FROZEN = ("backbone.body.conv1.", "backbone.body.layer1.")


class Parts(nn.Module):
    """The parts with random weights and statistics, three stages trained, the stride in the first 1x1 convolution.

    The trunk is 64 channels wide.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()

        def norm(channels: int) -> nn.Module:
            return torchvision.ops.FrozenBatchNorm2d(channels, 0.0)

        body = ResNet(Bottleneck, list(architecture.layers), norm_layer=norm)
        for stage in (body.layer2, body.layer3, body.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
        channels, classes = architecture.pyramid_channels, architecture.classes + 1
        stages = {f"layer{number}": str(number) for number in range(1, 5)}
        wide = [256, 512, 1024, 2048]
        self.backbone = BackboneWithFPN(body, stages, wide, channels, extra_blocks=LastLevelMaxPool())
        self.rpn = RPNHead(channels, len(architecture.anchor_ratios))
        self.box_hidden = TwoMLPHead(channels * architecture.box_resolution**2, architecture.box_channels)
        self.box_head = FastRCNNPredictor(architecture.box_channels, classes)
        self.mask_hidden = MaskRCNNHeads(channels, [channels] * architecture.mask_convolutions, 1)
        self.mask_head = MaskRCNNPredictor(channels, channels, classes)
        self._scatter()

    @torch.no_grad()
    def _scatter(self) -> None:
        """Norms of a trained network's kind, and heads whose every part is far above rounding."""
        for module in self.modules():
            if isinstance(module, torchvision.ops.FrozenBatchNorm2d):
                for name, low, high in (("weight", 0.5, 1.0), ("bias", -0.3, 0.3), ("running_mean", -0.3, 0.3)):
                    getattr(module, name).uniform_(low, high)
                module.running_var.uniform_(0.8, 1.5)
        for name, parameter in self.named_parameters():
            if not name.startswith("backbone.body."):
                parameter.normal_(0.0, 0.05)
            parameter.requires_grad_(not name.startswith(FROZEN))

    def pyramid(self, image_NCHW: Tensor) -> list[Tensor]:
        """P2 to P6."""
        return list(self.backbone(image_NCHW).values())

    def boxes(self, x_RCSS: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits and offsets."""
        return self.box_head(self.box_hidden(x_RCSS))

    def masks(self, x_RCSS: Tensor) -> Tensor:
        """Logits of masks."""
        return self.mask_head(self.mask_hidden(x_RCSS))

    def ours(self, architecture: Architecture, gradients: bool = False) -> dict[str, Tensor]:
        """All tensors, or all gradients that there are, as our network has them."""
        found = {}
        for name, tensor in self.state_dict(keep_vars=True).items():
            value = tensor.grad if gradients else tensor.detach()
            if value is not None and not name.startswith("backbone.body.fc."):
                ours = _our_name(name)
                found[ours] = _in_our_shape(ours, value, architecture)
        return found


def _our_name(name: str) -> str:
    name = re.sub(r"(inner_blocks|layer_blocks)\.(\d)\.0\.", r"\1.\2.", name)
    name = name.replace("rpn.conv.0.0.", "rpn.conv.").replace("box_hidden.", "box_head.")
    return re.sub(r"mask_hidden\.(\d)\.0\.", lambda match: f"mask_head.convolutions.mask_fcn{int(match[1]) + 1}.", name)


def _in_our_shape(name: str, value: Tensor, architecture: Architecture) -> Tensor:
    if name == "box_head.fc6.weight":
        side = architecture.box_resolution
        return value.view(-1, architecture.pyramid_channels, side, side)
    if name == "box_head.fc7.weight":
        return value[:, :, None, None]
    if name == "mask_head.conv5_mask.weight":  # (in, out, 2, 2)
        return value.permute(2, 3, 1, 0).flatten(0, 2)[:, :, None, None]
    return value
