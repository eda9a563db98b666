"""The Inception network of FID: Inception-v3 (Szegedy et al. 2016), for TensorFlow's weights of 2015-12-05.

It is torchvision's network with other pooling branches: averages exclude the padding, and the last block uses maxima.
Parameters have the names of the published file, whose classifier (``fc``) is not included here.

Shapes: N pictures, H and W pixels, C channels, F features.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.inception import (
    BasicConv2d,
    Inception3,
    InceptionA,
    InceptionAux,
    InceptionB,
    InceptionC,
    InceptionD,
    InceptionE,
)

from benchmarks.stable_diffusion.frozen.inference import freeze

IMAGE_CHANNELS = 3
FEATURES = 2048
"""Features of the published network."""


class Inception(Inception3):
    """Frozen network that maps pictures to the features whose statistics FID compares.

    Args:
        width_factor: multiplier of all channels, a multiple of 1/32; 1 for the published network.
        resolution: height and width that pictures are resized to, px; at least 75.
    """

    def __init__(self, width_factor: float = 1.0, resolution: int = 299) -> None:
        def convolution(channels: int, out: int, **sizes: int | tuple[int, int]) -> nn.Module:
            scaled = channels if channels == IMAGE_CHANNELS else round(channels * width_factor)
            network: nn.Module = BasicConv2d(scaled, round(out * width_factor), **sizes)
            return network

        blocks = (_BlockA, InceptionB, _BlockC, InceptionD, _BlockE, InceptionAux)
        super().__init__(
            num_classes=1,
            aux_logits=False,
            inception_blocks=[convolution, *(functools.partial(block, conv_block=convolution) for block in blocks)],
            init_weights=False,
        )
        self.Mixed_7c.pool = _maximum
        self.fc = nn.Identity()
        self.resolution = resolution
        self.out = round(FEATURES * width_factor)
        """Features F: 2,048 at width 1."""
        freeze(self)

    def features(self, images_N3HW: Tensor) -> Tensor:
        """Return the features of pictures: (N, F) in the network's dtype.

        Args:
            images_N3HW: in [0, 1], of any size, floating-point; they are resized in float32.
        """
        size = (self.resolution, self.resolution)
        resized = F.interpolate(images_N3HW.float(), size=size, mode="bilinear", align_corners=False)
        features_NF: Tensor = self((2 * resized - 1).to(self.Conv2d_1a_3x3.conv.weight.dtype))
        return features_NF


def _mean(x_NCHW: Tensor) -> Tensor:
    return F.avg_pool2d(x_NCHW, kernel_size=3, stride=1, padding=1, count_include_pad=False)


def _maximum(x_NCHW: Tensor) -> Tensor:
    return F.max_pool2d(x_NCHW, kernel_size=3, stride=1, padding=1)


class _BlockA(InceptionA):
    def forward(self, x_NCHW: Tensor) -> Tensor:
        branches = [
            self.branch1x1(x_NCHW),
            self.branch5x5_2(self.branch5x5_1(x_NCHW)),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x_NCHW))),
            self.branch_pool(_mean(x_NCHW)),
        ]
        return torch.cat(branches, dim=1)


class _BlockC(InceptionC):
    def forward(self, x_NCHW: Tensor) -> Tensor:
        doubled = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x_NCHW)))
        branches = [
            self.branch1x1(x_NCHW),
            self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x_NCHW))),
            self.branch7x7dbl_5(self.branch7x7dbl_4(doubled)),
            self.branch_pool(_mean(x_NCHW)),
        ]
        return torch.cat(branches, dim=1)


class _BlockE(InceptionE):
    pool = staticmethod(_mean)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        single = self.branch3x3_1(x_NCHW)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x_NCHW))
        branches = [
            self.branch1x1(x_NCHW),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(self.pool(x_NCHW)),
        ]
        return torch.cat(branches, dim=1)
