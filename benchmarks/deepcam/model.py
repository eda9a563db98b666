"""The network of DeepCAM: DeepLabv3+ with a modified Xception encoder, which labels every pixel of a climate snapshot.

It is the network of the MLPerf HPC reference. The encoder has output stride 16: a stem, three entry blocks of stride 2,
sixteen middle blocks, an exit block and three dilated separable convolutions. Its result goes through atrous spatial
pyramid pooling (ASPP). The decoder upsamples with transposed convolutions only, and adds the low-level feature, the
result of the first entry block.

A separable convolution is a depthwise 3x3 convolution, then a pointwise one, without batch norm or ReLU between them.
Batch norms are those of :mod:`common.nn.batch_norm`, which fuse ReLU, and the end of a block: residual and ReLU.

Shapes: N samples, C channels, H height, W width, K classes. Activations and kernels are channels_last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.deepcam.ops.depthwise_convolution import DEPTHWISE_CONVOLUTION
from benchmarks.deepcam.samples import CHANNELS, CLASSES
from common.config.ranges import AtLeast, Each, Positive, Range, ShareAboveZero
from common.nn.batch_norm import BatchNorm2d
from common.nn.choice import choose_layers
from common.nn.convolution import cast_weights
from common.ops.batch_norm import BATCH_NORM
from common.ops.operation import REFERENCE, Operation, OperationRequest
from common.ops.triton_support import widen

OUTPUT_STRIDE = 16
"""Height of the input, divided by the height of the encoder's result."""

OPERATIONS: dict[str, Operation] = {"batch_norm": BATCH_NORM, "depthwise_convolution": DEPTHWISE_CONVOLUTION}
"""Operations whose implementation can be chosen in ``model.implementations``."""

ImageSize = Range(
    f"two multiples of {OUTPUT_STRIDE}, the output stride of the encoder",
    lambda size: all(pixels > 0 and pixels % OUTPUT_STRIDE == 0 for pixels in size),
)


@dataclass(frozen=True)
class DeepLabArchitecture:
    """Sizes of the network, all of which the rules fix.

    Attributes:
        image_size: height and width of a sample in pixels.
        stem: channels of the two convolutions of the stem.
        entry: channels of the entry blocks. The middle blocks have those of the last one.
        middle_blocks: number of middle blocks.
        exit: channels of the exit block, and of the three separable convolutions behind it.
        exit_dilation: dilation of these three.
        aspp_dilations: dilations of the 3x3 convolutions of the ASPP.
        decoder: channels of every branch of the ASPP, and of the decoder.
        low_level: channels to which the decoder reduces the low-level feature.
        norm_epsilon: added to the variance in every batch norm.
        norm_momentum: weight of a batch's statistics in the running statistics.
    """

    image_size: Annotated[tuple[int, int], ImageSize]
    stem: Annotated[tuple[int, int], Each(AtLeast(1))]
    entry: Annotated[tuple[int, int, int], Each(AtLeast(1))]
    middle_blocks: Annotated[int, AtLeast(0)]
    exit: Annotated[tuple[int, int, int, int], Each(AtLeast(1))]
    exit_dilation: Annotated[int, AtLeast(1)]
    aspp_dilations: Annotated[tuple[int, ...], Each(AtLeast(1))]
    decoder: Annotated[int, AtLeast(1)]
    low_level: Annotated[int, AtLeast(1)]
    norm_epsilon: Annotated[float, Positive]
    norm_momentum: Annotated[float, ShareAboveZero]


class DepthwiseConv2d(nn.Conv2d):
    """Depthwise 3x3 convolution without bias whose padding keeps height and width at stride 1."""

    def __init__(self, channels: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__(channels, channels, 3, stride, dilation, dilation, channels, bias=False)
        self._convolution = DEPTHWISE_CONVOLUTION.choice(REFERENCE)

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation and return its name; see :meth:`common.nn.choice.Choosing.choose`."""
        self._convolution = DEPTHWISE_CONVOLUTION.select(requested, OperationRequest(self.weight.device, dtype))
        return self._convolution.name

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return (N, C, ceil(H / stride), ceil(W / stride))."""
        result: Tensor = self._convolution.function(x_NCHW, self.weight, self.stride[0], self.dilation[0])
        return result


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """Return a convolution without bias whose padding keeps height and width at stride 1."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2 * dilation, dilation, bias=False)


def upsampling(inputs: int, outputs: int) -> nn.ConvTranspose2d:
    """Return a transposed 3x3 convolution without bias that doubles height and width."""
    return nn.ConvTranspose2d(inputs, outputs, 3, stride=2, padding=1, output_padding=1, bias=False)


def separable(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """Return a depthwise 3x3 convolution and a pointwise one."""
    return nn.Sequential(DepthwiseConv2d(inputs, stride, dilation), conv(inputs, outputs, 1))


def with_norm(layer: nn.Module, channels: int) -> nn.Sequential:
    """Return ``layer``, then batch norm with ReLU."""
    return nn.Sequential(layer, BatchNorm2d(channels, relu=True))


Pair = tuple[Tensor, Tensor]
"""The same values for the two consumers of a block's result: main path and skip connection of the next block."""


class MiddleBlock(nn.Module):
    """Three separable convolutions, each with batch norm, and an identity skip connection.

    ReLU follows the first two batch norms and the sum.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.main = nn.Sequential(*(with_norm(separable(channels, channels), channels) for _ in range(2)))
        self.last = separable(channels, channels)
        self.last_norm = BatchNorm2d(channels)

    def forward(self, x: Pair) -> Pair:
        """Return ``relu(main(x) + x)`` twice."""
        return self.last_norm.add_relu(self.last(self.main(x[0])), x[1])


class ProjectionBlock(nn.Module):
    """Two separable convolutions with batch norm, a third one without, and a projection with batch norm as skip.

    ReLU follows only the first batch norm.

    Args:
        stride: stride of the third separable convolution and of the projection.
        first: outputs of the first separable convolution.
    """

    def __init__(self, inputs: int, outputs: int, first: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            with_norm(separable(inputs, first), first),
            separable(first, outputs),
            BatchNorm2d(outputs),
            separable(outputs, outputs, stride),
        )
        self.skip = conv(inputs, outputs, 1, stride)
        self.skip_norm = BatchNorm2d(outputs)

    def forward(self, x: Pair, relu: bool) -> Pair:
        """Return ``main(x) + norm(skip(x))`` twice, after a ReLU if ``relu``."""
        if relu:
            return self.skip_norm.add_relu(self.skip(x[1]), self.main(x[0]))
        y: Tensor = self.main(x[0]) + self.skip_norm(self.skip(x[1]))
        return y, y


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: parallel convolutions of several dilations and the mean over the image.

    The branch of the mean has a trained scale and shift per channel instead of a batch norm.
    """

    def __init__(self, inputs: int, outputs: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        layers = [conv(inputs, outputs, 1), *(conv(inputs, outputs, 3, dilation=each) for each in dilations)]
        self.branches = nn.ModuleList(with_norm(layer, outputs) for layer in layers)
        self.pooled = conv(inputs, outputs, 1)
        self.scale = nn.Parameter(torch.ones(outputs))
        self.shift = nn.Parameter(torch.zeros(outputs))
        self.fuse = with_norm(conv((len(layers) + 1) * outputs, outputs, 1), outputs)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return (N, outputs, H, W)."""
        mean_NC11 = self.pooled(x_NCHW.mean((2, 3), keepdim=True))
        scaled_NC11 = F.relu(mean_NC11 * self.scale.view(-1, 1, 1) + self.shift.view(-1, 1, 1)).to(x_NCHW.dtype)
        # A view with strides of 0 would make the concatenation contiguous instead of channels_last.
        tiled_NCHW = scaled_NC11.expand(-1, -1, *x_NCHW.shape[2:]).contiguous(memory_format=torch.channels_last)
        return self.fuse(torch.cat([*(branch(x_NCHW) for branch in self.branches), tiled_NCHW], 1))


class Decoder(nn.Module):
    """Upsamples the encoder's result sixteenfold; the low-level feature joins at a quarter of the input's size."""

    def __init__(self, channels: int, low_level_inputs: int, low_level: int) -> None:
        super().__init__()
        self.low_level = with_norm(conv(low_level_inputs, low_level, 1), low_level)
        self.upsample = nn.Sequential(*(with_norm(upsampling(channels, channels), channels) for _ in range(2)))
        self.merge = nn.Sequential(
            with_norm(conv(channels + low_level, channels, 3), channels),
            with_norm(conv(channels, channels, 3), channels),
            nn.Conv2d(channels, channels, 1),
        )
        self.full_size = with_norm(upsampling(channels, channels), channels)
        self.classes = upsampling(channels, CLASSES)

    def forward(self, x_NCHW: Tensor, low_level_NCHW: Tensor) -> Tensor:
        """Return logits (N, K, 16 H, 16 W)."""
        merged = self.merge(torch.cat([self.upsample(x_NCHW), self.low_level(low_level_NCHW)], 1))
        logits_NKHW: Tensor = self.classes(self.full_size(merged))
        return logits_NKHW


class DeepLab(nn.Module):
    """The network.

    Args:
        low_level_relu: whether the low-level feature is the result of the first entry block behind its ReLU. So it is
            in the reference, whose ReLU works in place on the tensor that the decoder reads. In NVIDIA's submissions
            it is the result before the ReLU.
        generator: CPU generator that draws the initial weights; None keeps those of PyTorch's layers.
    """

    def __init__(
        self, architecture: DeepLabArchitecture, low_level_relu: bool = True, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.architecture, self._low_level_relu = architecture, low_level_relu
        first, second = architecture.stem
        entry, exits = architecture.entry, architecture.exit
        self.stem = nn.Sequential(
            with_norm(conv(CHANNELS, first, 3, stride=2), first), with_norm(conv(first, second, 3), second)
        )
        self.entry = nn.ModuleList(ProjectionBlock(*pair, pair[1], stride=2) for pair in pairwise((second, *entry)))
        self.middle = nn.Sequential(*(MiddleBlock(entry[-1]) for _ in range(architecture.middle_blocks)))
        self.exit_block = ProjectionBlock(entry[-1], exits[0], entry[-1], stride=1)
        dilation = architecture.exit_dilation
        self.exit = nn.Sequential(
            *(with_norm(separable(*pair, dilation=dilation), pair[1]) for pair in pairwise(exits))
        )
        self.aspp = ASPP(exits[-1], architecture.decoder, architecture.aspp_dilations)
        self.decoder = Decoder(architecture.decoder, entry[0], architecture.low_level)
        for module in self.modules():
            if isinstance(module, BatchNorm2d):
                module.eps, module.momentum = architecture.norm_epsilon, architecture.norm_momentum
        if generator is not None:
            self._initialise(generator)
        self.to(memory_format=torch.channels_last)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Draw the reference's weights: He-normal in the encoder and the branches of the ASPP, elsewhere PyTorch's."""
        others = (self.decoder, self.aspp.pooled, self.aspp.fuse)
        uniform = {layer for part in others for layer in part.modules()}
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
                if layer not in uniform:
                    nn.init.kaiming_normal_(layer.weight, generator=generator)
                    continue
                # weights and bias of PyTorch's convolutions are uniform within 1 / sqrt(fan in)
                bound = layer.weight[0].numel() ** -0.5
                for parameter in layer.parameters():
                    parameter.uniform_(-bound, bound, generator=generator)

    def cast(self, dtype: torch.dtype) -> DeepLab:
        """Convert the weights of convolutions to ``dtype``, see :func:`common.nn.convolution.cast_weights`."""
        cast_weights(self, dtype)
        return self

    def choose_implementations(self, requested: Mapping[str, str], dtype: torch.dtype) -> dict[str, str]:
        """Choose the implementations of the layers; see :func:`common.nn.choice.choose_layers`."""
        kinds = {"batch_norm": BatchNorm2d, "depthwise_convolution": DepthwiseConv2d}
        return choose_layers(self, kinds, requested, dtype)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return logits (N, K, H, W), at least fp32, of normalised samples in the dtype of the weights."""
        stem = self.stem(x_NCHW)
        first, *others = self.entry
        x = first((stem, stem), relu=self._low_level_relu)
        low_level_NCHW = x[0]
        if not self._low_level_relu:
            x = (rectified := F.relu(low_level_NCHW), rectified)
        for block in others:
            x = block(x, relu=True)
        features_NCHW, _ = self.exit_block(self.middle(x), relu=False)
        return widen(self.decoder(self.aspp(self.exit(features_NCHW)), low_level_NCHW))


def forward_flops(architecture: DeepLabArchitecture) -> dict[str, int]:
    """Return the FLOPs (2 per multiply-add) of a forward pass on one sample, by module; "" is the network."""
    with torch.device("meta"):
        network = DeepLab(architecture)
        sample_NCHW = torch.empty(1, CHANNELS, *architecture.image_size)
    with FlopCounterMode(display=False) as counter:
        network(sample_NCHW)
    root = type(network).__name__
    counts = {name: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    return {name.removeprefix(root).lstrip("."): flops for name, flops in counts.items() if name.startswith(root)}


def normalised(x_NHWC: Tensor, shift_C: Tensor, scale_C: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``scale * (x - shift)`` in ``dtype`` as (N, C, H, W), a view of channels_last memory."""
    return (scale_C * (x_NHWC - shift_C)).to(dtype).movedim(-1, 1)


def weighted_cross_entropy(logits_NKHW: Tensor, label_NHW: Tensor, weight_K: Tensor) -> Tensor:
    """Return the mean over all pixels of ``weight[label]`` times the cross-entropy.

    PyTorch's own mean would divide by the sum of the weights.
    """
    return F.cross_entropy(logits_NKHW, label_NHW.long(), weight_K, reduction="none").mean()
