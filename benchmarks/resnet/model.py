"""ResNet-50 v1.5 and its loss.

The network is the trunk of :mod:`common.nn.resnet` with bottleneck blocks and a classifier. The 3x3 convolution of a
block has the stride. Parameters are named as in torchvision's ``resnet50``.

Shapes: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.nn.batch_norm import BatchNorm2d
from common.nn.choice import choose_layers
from common.nn.convolution import Conv2d, cast_weights
from common.nn.resnet import IMAGE_CHANNELS, PADDED_CHANNELS, ResNetShape, ResNetTrunk, TrainedNorm

TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a standard normal distribution that is truncated at 2 sigma."""


@dataclass(frozen=True)
class Architecture:
    """Shape of the network.

    Attributes:
        width: channels of conv1 and of the 3x3 convolutions in the first stage.
        classes: number of classes K.
        norm_epsilon: added to the variance in every batch norm.
        norm_momentum: weight of a batch's statistics in the running statistics.
        layers: blocks per stage. 16 blocks of 3 convolutions, conv1 and the classifier are the 50 layers of the name.
    """

    width: int
    classes: int
    norm_epsilon: float
    norm_momentum: float
    layers: tuple[int, ...] = (3, 4, 6, 3)

    def trunk(self) -> ResNetShape:
        """Return the shape of the network without the classifier."""
        norm = TrainedNorm(self.norm_epsilon, self.norm_momentum)
        return ResNetShape(self.layers, self.width, bottleneck=True, norm=norm, input_channels=PADDED_CHANNELS)


class ResNet50(ResNetTrunk):
    """ResNet v1.5 with bottleneck blocks.

    Args:
        generator: CPU generator that draws the initial weights.
        truncated_normal: truncate the normal distribution of convolution weights at 2 sigma and keep its variance.
    """

    def __init__(self, architecture: Architecture, generator: torch.Generator, truncated_normal: bool = False) -> None:
        super().__init__(architecture.trunk())
        self.architecture = architecture
        self.fc = nn.Linear(self.shape.out_channels[-1], architecture.classes)
        self._initialise(generator, truncated_normal)
        self.to(memory_format=torch.channels_last)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator, truncated_normal: bool) -> None:
        """Initialise convolutions He-normal over fan_in and the classifier from N(0, 0.01)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                images = module.weight[:, :IMAGE_CHANNELS] if module is self.conv1 else module.weight
                std = math.sqrt(2.0 / images[0].numel())
                drawn = torch.empty(images.shape)
                if truncated_normal:
                    std /= TRUNCATED_STD
                    nn.init.trunc_normal_(drawn, 0.0, std, -2 * std, 2 * std, generator=generator)
                else:
                    drawn.normal_(0.0, std, generator=generator)
                module.weight.zero_()
                images.copy_(drawn)
        self.fc.weight.normal_(0.0, 0.01, generator=generator)
        self.fc.bias.zero_()

    def cast(self, dtype: torch.dtype) -> ResNet50:
        """Convert the weights of convolutions and classifier to ``dtype``, which the activations then have too.

        Batch norms stay fp32, unless ``dtype`` is fp64. Replaces the data of the parameters: call it before an
        optimizer is created.
        """
        cast_weights(self, dtype)
        return self

    def choose_implementations(self, requested: Mapping[str, str]) -> dict[str, str]:
        """Choose implementations of the batch norms and of the convolutions before them.

        Call this after :meth:`cast`, with the network on its final device.

        Args:
            requested: configuration ``model.implementations``.

        Returns:
            Name of the operation to the implementations chosen.

        Raises:
            UnsupportedImplementation: see :func:`common.nn.choice.choose_layers`.
        """
        kinds = {"batch_norm": BatchNorm2d, "convolution_moments": Conv2d}
        return choose_layers(self, kinds, requested, self.conv1.weight.dtype)

    def forward(self, image_NCHW: Tensor) -> Tensor:
        """Classify images.

        Args:
            image_NCHW: normalised images in the dtype of the weights. C is 3, or 4 with zeros in the fourth channel.

        Returns:
            fp32 logits (N, K); fp64 if the weights are fp64.
        """
        (x_NCHW,) = self.features(image_NCHW, [len(self.shape.layers)])
        logits_NK = self.fc(x_NCHW.mean((2, 3)))
        return logits_NK if logits_NK.dtype == torch.float64 else logits_NK.float()

    def sample_flops(self, image_size: int) -> float:
        """Return the model FLOPs to train on one image: forward pass and gradients of inputs and weights.

        A multiply-add is 2 FLOPs. The first convolution needs no input gradient, and its fourth channel does not
        count.
        """
        layers, _ = self.flops((image_size, image_size))
        classifier = 2.0 * self.fc.in_features * self.fc.out_features
        return sum(layer.training for layer in layers) + 3.0 * classifier


def smoothed_cross_entropy(
    logits_NK: Tensor, label_N: Tensor, smoothing: float = 0.0, reduction: str = "sum"
) -> Tensor:
    """Return the cross-entropy against ``(1 - smoothing) * one_hot + smoothing / K``, in fp32 (fp64 for fp64 logits).

    Args:
        label_N: int64 classes in 0 ... K-1.
        smoothing: 0 or 0.1 in the closed division.
        reduction: ``sum`` or ``mean`` over N, or ``none``.
    """
    wide = logits_NK if logits_NK.dtype == torch.float64 else logits_NK.float()
    return F.cross_entropy(wide, label_N, label_smoothing=smoothing, reduction=reduction)
