"""ResNet-50 v1.5 and its loss.

Post-activation bottleneck residual network (He et al., arXiv:1512.03385) with the stride in the 3x3 convolution of a
downsampling block. Parameters are named as in torchvision's ``resnet50``. A block hands on its output twice, as
``(for the convolution, for the residual)``, so that the fused batch norm receives both gradients separately.

Shapes: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.nn import batch_norm, convolution
from common.nn.batch_norm import BatchNorm2d
from common.nn.convolution import Conv2d

EXPANSION = 4
"""Channels that a bottleneck block puts out per channel of its 3x3 convolution."""

IMAGE_CHANNELS = 3
TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut at 2 sigma."""


@dataclass(frozen=True)
class Architecture:
    """The shape of the network.

    Attributes:
        width: channels of conv1 and of the first stage's 3x3 convolutions.
        input_channels: 3, or 4 with a fourth channel that is always zero (faster loads in half precision).
        classes: K.
        norm_epsilon: added to the variance of every batch norm.
        norm_momentum: weight of a batch's statistics in the running ones.
        layers: blocks in each stage; 50 layers with weights are 16 blocks of three, conv1 and the classifier.
    """

    width: int
    input_channels: int
    classes: int
    norm_epsilon: float
    norm_momentum: float
    layers: tuple[int, ...] = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut, each followed by batch norm.

    Args:
        in_channels: C of the input.
        width: C of the 3x3 convolution; the output has ``EXPANSION`` times as many channels.
        stride: of the 3x3 convolution and of the projection.
        project: whether the shortcut is a 1x1 convolution with batch norm instead of the identity.
    """

    def __init__(self, in_channels: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        out_channels = width * EXPANSION
        self.conv1 = Conv2d(in_channels, width, 1)
        self.bn1 = BatchNorm2d(width, relu=True)
        self.conv2 = Conv2d(width, width, 3, stride)
        self.bn2 = BatchNorm2d(width, relu=True)
        self.conv3 = Conv2d(width, out_channels, 1)
        self.bn3 = BatchNorm2d(out_channels)
        self.downsample: nn.Sequential | None = None
        if project:
            self.downsample = nn.Sequential(Conv2d(in_channels, out_channels, 1, stride), BatchNorm2d(out_channels))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Map ``(for the convolution, for the residual)``, both (N, C, H, W), to the same pair of the next block."""
        x_NCHW, residual_NCHW = inputs
        y_NCHW = self.bn1(*self.conv1.with_moments(x_NCHW))
        y_NCHW = self.bn2(*self.conv2.with_moments(y_NCHW))
        y_NCHW, moments = self.conv3.with_moments(y_NCHW)
        if self.downsample is None:
            return self.bn3.add_relu(y_NCHW, residual_NCHW, moments=moments)
        projection, norm = self.downsample
        assert isinstance(projection, Conv2d)
        assert isinstance(norm, BatchNorm2d)
        residual_NCHW, residual_moments = projection.with_moments(residual_NCHW)
        return self.bn3.add_relu(y_NCHW, residual_NCHW, norm, moments, residual_moments)


class ResNet50(nn.Module):
    """ResNet v1.5 with bottleneck blocks.

    Args:
        architecture: its shape.
        generator: source of the initial weights (a CPU generator).
        truncated_normal: cut the convolutions' normal distribution at 2 sigma, keeping its variance.
    """

    def __init__(self, architecture: Architecture, generator: torch.Generator, truncated_normal: bool = False) -> None:
        super().__init__()
        self.architecture = architecture
        self.conv1 = nn.Conv2d(architecture.input_channels, architecture.width, 7, stride=2, padding=3, bias=False)
        self.bn1 = BatchNorm2d(architecture.width, relu=True)
        channels = architecture.width
        for stage, blocks in enumerate(architecture.layers):
            width = architecture.width * 2**stage
            built = []
            for block in range(blocks):
                built.append(Bottleneck(channels, width, 2 if stage and not block else 1, project=not block))
                channels = width * EXPANSION
            self.add_module(f"layer{stage + 1}", nn.Sequential(*built))
        self.fc = nn.Linear(channels, architecture.classes)
        for module in self.modules():
            if isinstance(module, BatchNorm2d):
                module.eps, module.momentum = architecture.norm_epsilon, architecture.norm_momentum
        self.register_load_state_dict_pre_hook(_pad_first_convolution)
        self._initialise(generator, truncated_normal)
        self.to(memory_format=torch.channels_last)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator, truncated_normal: bool) -> None:
        """He-normal over fan_in for convolutions, N(0, 0.01) for the classifier, weight 1 for every batch norm."""
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
        """Store convolution and classifier weights in ``dtype``, which the activations then have too.

        Batch norms stay fp32, except beside fp64. Replaces the data of the parameters: call it before an optimizer
        takes them.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear) or dtype == torch.float64:
                module.to(dtype)
        return self

    def choose_implementation(self, requested: str = "auto") -> str:
        """Choose how batch norm runs; call it on the final device after :meth:`cast`. Returns the name chosen.

        ``cudnn`` is Triton's batch norm with convolutions that leave it the moments of their results; any other name
        keeps PyTorch's convolutions.

        Raises:
            UnsupportedImplementation: see :func:`common.ops.implementation.select`.
        """
        dtype = self.conv1.weight.dtype
        norms = batch_norm.choose(self, "triton" if requested == "cudnn" else requested, dtype)
        convolutions = convolution.choose(self, "cudnn" if requested == "cudnn" else "torch", dtype)
        return norms if convolutions == "torch" else f"{norms}, moments by {convolutions}"

    def stages(self) -> Iterator[nn.Sequential]:
        """The stages in order."""
        for index in range(len(self.architecture.layers)):
            stage = self.get_submodule(f"layer{index + 1}")
            assert isinstance(stage, nn.Sequential)
            yield stage

    def forward(self, image_NCHW: Tensor) -> Tensor:
        """Classify images.

        Args:
            image_NCHW: normalised images in the weights' dtype; C is 3, or ``input_channels`` with zeros in the rest.

        Returns:
            fp32 logits (N, K); fp64 where the weights are.
        """
        weight = self.conv1.weight
        if image_NCHW.shape[1] != weight.shape[1]:
            weight = weight[:, : image_NCHW.shape[1]]
        x_NCHW = F.conv2d(image_NCHW, weight, stride=self.conv1.stride, padding=self.conv1.padding)
        x_NCHW = self.bn1.relu_max_pool(x_NCHW)
        pair = (x_NCHW, x_NCHW)
        for stage in self.stages():
            pair = stage(pair)
        logits_NK = self.fc(pair[0].mean((2, 3)))
        return logits_NK if logits_NK.dtype == torch.float64 else logits_NK.float()

    def sample_flops(self, image_size: int) -> float:
        """Model FLOPs (2 per multiply-add) to train on one image: forward, gradients of inputs and of weights.

        The first convolution needs no gradient of its input, and its fourth channel does not count.
        """
        first = 0.0
        forward = 0.0

        def convolution(module: nn.Conv2d, size: int, in_channels: int | None = None) -> tuple[float, int]:
            size = (size - 1) // module.stride[0] + 1
            channels = module.in_channels if in_channels is None else in_channels
            return 2.0 * size * size * channels * module.out_channels * module.kernel_size[0] ** 2, size

        first, size = convolution(self.conv1, image_size, IMAGE_CHANNELS)
        size = (size - 1) // 2 + 1
        for stage in self.stages():
            for block in stage:
                assert isinstance(block, Bottleneck)
                if block.downsample is not None:
                    projection = block.downsample[0]
                    assert isinstance(projection, nn.Conv2d)
                    forward += convolution(projection, size)[0]
                for module in (block.conv1, block.conv2, block.conv3):
                    flops, size = convolution(module, size)
                    forward += flops
        forward += 2.0 * self.fc.in_features * self.fc.out_features
        return 3.0 * forward + 2.0 * first


def _pad_first_convolution(module: ResNet50, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Give a 3-channel conv1 of a loaded state the zero slices that the model's own has."""
    name = prefix + "conv1.weight"
    weight = state_dict.get(name)
    missing = 0 if weight is None else module.conv1.in_channels - weight.shape[1]
    if weight is not None and weight.shape[1] == IMAGE_CHANNELS and missing > 0:
        state_dict[name] = F.pad(weight, (0, 0, 0, 0, 0, missing))


def smoothed_cross_entropy(
    logits_NK: Tensor, label_N: Tensor, smoothing: float = 0.0, reduction: str = "sum"
) -> Tensor:
    """Cross-entropy against ``(1 - smoothing) * one_hot + smoothing / K``, computed in fp32 (fp64 for fp64 logits).

    Args:
        logits_NK: logits.
        label_N: int64 classes in 0 ... K-1.
        smoothing: 0 or 0.1 in the closed division.
        reduction: ``sum`` or ``mean`` over N, or ``none``.
    """
    wide = logits_NK if logits_NK.dtype == torch.float64 else logits_NK.float()
    return F.cross_entropy(wide, label_N, label_smoothing=smoothing, reduction=reduction)
