"""Trunk of a residual network: the convolutional layers from the image to the outputs of its stages.

Post-activation residual blocks (He et al., arXiv:1512.03385), basic or bottleneck. A bottleneck has its stride in the
3x3 convolution or, as in that paper, in the first 1x1 convolution, and may have groups as in ResNeXt (Xie et al.,
arXiv:1611.05431). Parameters are named as in torchvision.

With trained batch norm, a block returns its output twice, as ``(for the convolution, for the residual)``, so that the
fused batch norm receives both gradients separately. With frozen batch norm, every convolution is fused with its norm,
ReLU and residual, and the layers before the first trained stage run without autograd and save nothing.

Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ConfigError
from common.nn.batch_norm import BatchNorm2d, FrozenBatchNorm2d
from common.nn.convolution import Conv2d, LayerFlops, Size, convolution_flops, result_size
from common.nn.frozen import mark_frozen
from common.nn.fused_convolution import FoldedConvolution, FusedConv2d

EXPANSION = 4
"""Ratio of a bottleneck block's output channels to the channels of its stage."""

IMAGE_CHANNELS = 3

PADDED_CHANNELS = 4
"""Channels of a padded image. The fourth is zero, so that the first convolution loads a 16-bit pixel as 8 bytes."""


@dataclass(frozen=True)
class TrainedNorm:
    """Batch norm with the statistics of the batch.

    Attributes:
        epsilon: added to the variance.
        momentum: weight of the batch statistics in the update of the running statistics.
    """

    epsilon: float
    momentum: float


@dataclass(frozen=True)
class FrozenNorm:
    """Batch norm that never changes, and the number of trained stages.

    Attributes:
        epsilon: added to the variance.
        trained_stages: number of last stages whose convolutions are trained; the convolutions before them are frozen.
            The number of stages plus one also trains the first convolution.
    """

    epsilon: float
    trained_stages: int


@dataclass(frozen=True)
class ResNetShape:
    """Sizes and options of a trunk.

    Attributes:
        layers: number of blocks in each stage.
        width: channels of the first convolution and of the first stage; each further stage doubles them.
        bottleneck: whether a block has 1x1, 3x3 and 1x1 convolutions and ``EXPANSION`` times the channels in its
            output, instead of two 3x3 convolutions.
        groups: groups of the 3x3 convolution of a bottleneck block.
        width_per_group: channels per group in the first stage; each further stage doubles them. None for ``width``.
        stride_in_1x1: whether the stride of a bottleneck block is in its first 1x1 convolution, as in the weights
            that the paper's authors published, instead of the 3x3 convolution.
        input_channels: ``IMAGE_CHANNELS`` or ``PADDED_CHANNELS``.

    Raises:
        ConfigError: there are no stages or a stage has no blocks, basic blocks have groups or ``stride_in_1x1``, or
            the number of stages does not fit ``strides`` or ``trained_stages``.
    """

    layers: tuple[int, ...]
    width: int
    bottleneck: bool
    norm: TrainedNorm | FrozenNorm
    groups: int = 1
    width_per_group: int | None = None
    strides: tuple[int, ...] = (1, 2, 2, 2)
    stride_in_1x1: bool = False
    input_channels: int = IMAGE_CHANNELS

    def __post_init__(self) -> None:
        stages = len(self.layers)
        if not stages or min(self.layers) < 1:
            raise ConfigError(f"layers={self.layers}: at least one stage, and one block in each")
        if not self.bottleneck and (self.groups != 1 or self.width_per_group not in (None, self.width)):
            raise ConfigError(
                f"groups={self.groups}, width_per_group={self.width_per_group}: basic blocks have one group of all "
                "channels; use bottleneck blocks"
            )
        if not self.bottleneck and self.stride_in_1x1:
            raise ConfigError("stride_in_1x1=true: basic blocks have no 1x1 convolution; use bottleneck blocks")
        if stages > len(self.strides):
            raise ConfigError(f"layers={self.layers}: {stages} stages, but strides={self.strides}")
        if isinstance(self.norm, FrozenNorm) and not 0 <= self.norm.trained_stages <= stages + 1:
            raise ConfigError(f"trained_stages={self.norm.trained_stages}: 0 to {stages + 1} for {stages} stages")

    @property
    def out_channels(self) -> tuple[int, ...]:
        """Channels of each stage's output."""
        expansion = EXPANSION if self.bottleneck else 1
        return tuple(self.width * 2**stage * expansion for stage in range(len(self.layers)))

    @property
    def first_trained_stage(self) -> int:
        """Number of the first stage whose convolutions are trained, from 1; 0 if ``conv1`` is trained too."""
        return len(self.layers) + 1 - self.norm.trained_stages if isinstance(self.norm, FrozenNorm) else 0


class _ConvolutionShape(NamedTuple):
    """Arguments of a convolution layer without bias."""

    in_channels: int
    out_channels: int
    kernel: int
    stride: int = 1
    groups: int = 1


class _BlockConvolutions(NamedTuple):
    """The convolutions of a block, and the projection of its shortcut; None for an identity shortcut."""

    convolutions: list[_ConvolutionShape]
    projection: _ConvolutionShape | None


def _blocks(shape: ResNetShape, stage: int) -> Iterator[_BlockConvolutions]:
    """Yield the blocks of a stage. ``stage`` counts from 0."""
    channels = shape.width if stage == 0 else shape.out_channels[stage - 1]
    width, out_channels = shape.width * 2**stage, shape.out_channels[stage]
    for block in range(shape.layers[stage]):
        stride = 1 if block else shape.strides[stage]
        if shape.bottleneck:
            inner = shape.groups * (shape.width_per_group or shape.width) * 2**stage
            first, second = (stride, 1) if shape.stride_in_1x1 else (1, stride)
            convolutions = [
                _ConvolutionShape(channels, inner, 1, first),
                _ConvolutionShape(inner, inner, 3, second, shape.groups),
                _ConvolutionShape(inner, out_channels, 1),
            ]
        else:
            convolutions = [_ConvolutionShape(channels, width, 3, stride), _ConvolutionShape(width, width, 3)]
        project = stride != 1 or channels != out_channels
        yield _BlockConvolutions(
            convolutions, _ConvolutionShape(channels, out_channels, 1, stride) if project else None
        )
        channels = out_channels


def _name_layers(
    block: nn.Module, layers: Sequence[tuple[nn.Module, nn.Module]], shortcut: tuple[nn.Module, nn.Module] | None
) -> None:
    """Register the convolutions and norms of a block with torchvision's names."""
    for number, (convolution, norm) in enumerate(layers, 1):
        block.add_module(f"conv{number}", convolution)
        block.add_module(f"bn{number}", norm)
    if shortcut is not None:
        block.add_module("downsample", nn.Sequential(*shortcut))


class TrainedNormBlock(nn.Module):
    """Residual block whose convolutions are followed by batch norm with the batch's statistics."""

    def __init__(self, block: _BlockConvolutions, norm: TrainedNorm) -> None:
        super().__init__()

        def layer(convolution: _ConvolutionShape, relu: bool) -> tuple[Conv2d, BatchNorm2d]:
            return Conv2d(*convolution), BatchNorm2d(convolution.out_channels, relu, norm.epsilon, norm.momentum)

        *inner, last = block.convolutions
        self._inner = [layer(convolution, relu=True) for convolution in inner]
        self._last = layer(last, relu=False)
        self._shortcut = None if block.projection is None else layer(block.projection, relu=False)
        _name_layers(self, [*self._inner, self._last], self._shortcut)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Map ``(for the convolution, for the residual)``, both (N, C, H, W), to the same pair for the next block."""
        y_NCHW, residual_NCHW = inputs
        for convolution, norm in self._inner:
            y_NCHW = norm(*convolution.with_moments(y_NCHW))
        convolution, norm = self._last
        y_NCHW, moments = convolution.with_moments(y_NCHW)
        if self._shortcut is None:
            return norm.add_relu(y_NCHW, residual_NCHW, moments=moments)
        projection, residual_norm = self._shortcut
        residual_NCHW, residual_moments = projection.with_moments(residual_NCHW)
        return norm.add_relu(y_NCHW, residual_NCHW, residual_norm, moments, residual_moments)


class FrozenNormBlock(nn.Module):
    """Residual block whose convolutions have a frozen batch norm folded into them."""

    def __init__(self, block: _BlockConvolutions, norm: FrozenNorm) -> None:
        super().__init__()

        def layer(convolution: _ConvolutionShape) -> tuple[FusedConv2d, FrozenBatchNorm2d]:
            return FusedConv2d(*convolution, bias=False), FrozenBatchNorm2d(convolution.out_channels, norm.epsilon)

        layers = [layer(convolution) for convolution in block.convolutions]
        shortcut = None if block.projection is None else layer(block.projection)
        _name_layers(self, layers, shortcut)
        self._layers = [FoldedConvolution(*pair) for pair in layers]
        self._shortcut = None if shortcut is None else FoldedConvolution(*shortcut)

    @property
    def last_norm(self) -> FrozenBatchNorm2d:
        """Batch norm of the last convolution, whose result is added to the shortcut."""
        norm = self.get_submodule(f"bn{len(self._layers)}")
        assert isinstance(norm, FrozenBatchNorm2d)
        return norm

    def folded(self) -> list[FoldedConvolution]:
        """Return all convolutions with their norms."""
        return self._layers if self._shortcut is None else [*self._layers, self._shortcut]

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Map (N, C, H, W) to the output of the block."""
        *inner, last = self._layers
        y_NCHW = x_NCHW
        for convolution in inner:
            y_NCHW = convolution(y_NCHW, relu=True)
        residual_NCHW = x_NCHW if self._shortcut is None else self._shortcut(x_NCHW, relu=False)
        return last(y_NCHW, relu=True, residual_NCHW=residual_NCHW)


class ResNetTrunk(nn.Module):
    """A residual network without its classifier: ``conv1``, ``bn1``, ``layer1``, and so on.

    It has no ``forward``; call :meth:`features`.

    The weights have PyTorch's default initialisation. :func:`draw_weights` and
    :func:`common.nn.backbone_file.load_backbone` replace them.
    """

    bn1: nn.Module

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        self.shape = shape
        norm, width = shape.norm, shape.width
        self._stem: FoldedConvolution | None = None
        self.conv1: nn.Conv2d
        if isinstance(norm, FrozenNorm):
            stem = FusedConv2d(shape.input_channels, width, 7, stride=2, bias=False)
            frozen_norm = FrozenBatchNorm2d(width, norm.epsilon)
            self.conv1, self.bn1, self._stem = stem, frozen_norm, FoldedConvolution(stem, frozen_norm)
        else:
            self.conv1 = nn.Conv2d(shape.input_channels, width, 7, stride=2, padding=3, bias=False)
            self.bn1 = BatchNorm2d(width, True, norm.epsilon, norm.momentum)
        for stage in range(len(shape.layers)):
            blocks = [
                FrozenNormBlock(block, norm) if isinstance(norm, FrozenNorm) else TrainedNormBlock(block, norm)
                for block in _blocks(shape, stage)
            ]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        if isinstance(norm, FrozenNorm):
            parts = ["conv1", *(f"layer{number}" for number in range(1, len(shape.layers) + 1))]
            frozen = parts[: shape.first_trained_stage]
            mark_frozen(self, [name for name, _ in self.named_parameters() if name.split(".")[0] in frozen])
            self.register_load_state_dict_post_hook(_refresh)
        self.register_load_state_dict_pre_hook(_pad_first_convolution)

    def stages(self) -> Iterator[nn.Sequential]:
        """Yield the stages in order."""
        for number in range(1, len(self.shape.layers) + 1):
            stage = self.get_submodule(f"layer{number}")
            assert isinstance(stage, nn.Sequential)
            yield stage

    def features(self, image_NCHW: Tensor, stages: Sequence[int] | None = None) -> list[Tensor]:
        """Return the outputs of stages, (N, C, H, W) each, in the dtype of the weights.

        Args:
            image_NCHW: normalised images in the dtype of the weights. C is ``input_channels``, and the fourth channel
                is zero. With a trained norm, C may always be 3.
            stages: ascending numbers of the wanted stages, from 1 as in ``layer1``; None for all. Stages after the
                last wanted one do not run.
        """
        wanted = range(1, len(self.shape.layers) + 1) if stages is None else stages
        trained, paired = self.shape.first_trained_stage, isinstance(self.shape.norm, TrainedNorm)
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained == 0):
            x_NCHW = self._pooled_stem(image_NCHW)
        value: Any = (x_NCHW, x_NCHW) if paired else x_NCHW
        outputs: list[Tensor] = []
        for number, stage in zip(range(1, max(wanted) + 1), self.stages(), strict=False):
            with torch.set_grad_enabled(torch.is_grad_enabled() and number >= trained):
                value = stage(value)
            if number in wanted:
                outputs.append(value[0] if paired else value)
        return outputs

    def _pooled_stem(self, image_NCHW: Tensor) -> Tensor:
        if self._stem is not None:
            return F.max_pool2d(self._stem(image_NCHW, relu=True), 3, stride=2, padding=1)
        weight = self.conv1.weight
        if image_NCHW.shape[1] != weight.shape[1]:
            weight = weight[:, : image_NCHW.shape[1]]
        x_NCHW = F.conv2d(image_NCHW, weight, stride=self.conv1.stride, padding=self.conv1.padding)
        assert isinstance(self.bn1, BatchNorm2d)
        return self.bn1.relu_max_pool(x_NCHW)

    def folded(self) -> Iterator[FoldedConvolution]:
        """Yield all convolutions with frozen batch norm."""
        if self._stem is not None:
            yield self._stem
        for stage in self.stages():
            for block in stage:
                if isinstance(block, FrozenNormBlock):
                    yield from block.folded()

    def flops(self, image_size: Size) -> tuple[list[LayerFlops], list[Size]]:
        """Return the FLOPs of every convolution for one image, and height and width of each stage's output.

        A fourth input channel does not count.
        """
        layers = [convolution_flops("conv1", self.conv1, image_size, input_gradient=False, in_channels=IMAGE_CHANNELS)]
        trained = self.conv1.weight.requires_grad
        height, width = result_size(self.conv1, image_size)
        size = ((height - 1) // 2 + 1, (width - 1) // 2 + 1)  # max pooling
        sizes = []
        for number, stage in enumerate(self.stages(), 1):
            for index, block in enumerate(stage):
                trained_before, block_size = trained, size
                for name, convolution in block.named_modules():
                    if not isinstance(convolution, nn.Conv2d):
                        continue
                    name = f"layer{number}.{index}.{name}"
                    if "downsample" in name:
                        layers.append(convolution_flops(name, convolution, block_size, trained_before))
                        continue
                    layers.append(convolution_flops(name, convolution, size, trained))
                    trained = trained or convolution.weight.requires_grad
                    size = result_size(convolution, size)
            sizes.append(size)
        return layers, sizes


@torch.no_grad()
def draw_weights(trunk: ResNetTrunk, generator: torch.Generator) -> None:
    """Draw He-normal weights over fan-out for all convolutions, as torchvision does.

    Trained norms are unchanged. A frozen norm does not normalise, so every block would double the variance of its
    shortcut. To prevent this, the weight of the last norm of each block is set to 1 / sqrt(number of blocks).
    """
    for module in trunk.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
    trunk.conv1.weight[:, IMAGE_CHANNELS:] = 0
    blocks = [module for module in trunk.modules() if isinstance(module, FrozenNormBlock)]
    for block in blocks:
        block.last_norm.weight.fill_(len(blocks) ** -0.5)


def _pad_first_convolution(module: ResNetTrunk, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Pad a 3-channel conv1 weight of a loaded state with zeros to the model's number of input channels."""
    name = prefix + "conv1.weight"
    weight = state_dict.get(name)
    missing = 0 if weight is None else module.conv1.in_channels - weight.shape[1]
    if weight is not None and weight.shape[1] == IMAGE_CHANNELS and missing > 0:
        state_dict[name] = F.pad(weight, (0, 0, 0, 0, 0, missing))


def _refresh(module: ResNetTrunk, incompatible: object) -> None:
    """Fold the loaded tensors again, for graphs that were captured before."""
    for convolution in module.folded():
        convolution.refresh()
