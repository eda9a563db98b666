"""The three heads of Mask R-CNN: proposals for every cell of the pyramid, and boxes and masks of regions.

Weights for a region's features have the shapes of convolutions, so that channels_last features are read without a
copy. Convolutions with few outputs are padded with zero filters to a number of channels that tensor cores need.

Legend: N pictures, A anchors of a cell, H W height and width of a level, R regions, C channels, S height and width of
a region's features, K classes without background.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.maskrcnn.config import Architecture
from benchmarks.maskrcnn.ops.selected_logits import SELECTED_LOGITS
from common.nn.convolution import LayerFlops, Size, convolution_flops
from common.nn.fused_convolution import FusedConv2d
from common.nn.mlp import padded_columns
from common.ops.linear_relu import LINEAR_RELU
from common.ops.operation import OperationRequest

BOX = 4
"""Coordinates of a box."""

PROPOSAL_STD = 0.01
CLASS_STD = 0.01
BOX_STD = 0.001
"""Standard deviations of initial weights: of the proposal network, and of the two output layers of the box head."""

ENLARGED = 2
"""Height and width of the pixels that the mask head's transposed convolution makes from one pixel."""


class RpnOutput(NamedTuple):
    """Outputs of the region proposal network for one level.

    Attributes:
        logits_NAHW: logits of an object at each anchor, in channels_last memory.
        deltas_NAHW: (N, A * 4, H, W), box offsets from each anchor, in channels_last memory.
    """

    logits_NAHW: Tensor
    deltas_NAHW: Tensor

    def flat(self) -> tuple[Tensor, Tensor]:
        """Return views: logits (N, H * W * A) and offsets (N, H * W * A, 4), in the order of the anchors."""
        images = self.logits_NAHW.shape[0]
        logits_NHWA, deltas_NHWA = (output.permute(0, 2, 3, 1) for output in self)
        return logits_NHWA.view(images, -1), deltas_NHWA.view(images, -1, BOX)


class RpnHead(nn.Module):
    """Region proposal network (Ren et al., arXiv:1506.01497, section 3.1), shared by all levels."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        channels, shapes = architecture.pyramid_channels, len(architecture.anchor_ratios)
        self.conv = FusedConv2d(channels, channels, 3)
        self.cls_logits = FusedConv2d(channels, shapes, 1)
        self.bbox_pred = FusedConv2d(channels, shapes * BOX, 1)

    @torch.no_grad()
    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw normal weights from a CPU generator; biases are 0."""
        for layer in (self.conv, self.cls_logits, self.bbox_pred):
            layer.weight.normal_(0.0, PROPOSAL_STD, generator=generator)
            _zero_bias(layer)

    def forward(self, level_NCHW: Tensor) -> RpnOutput:
        """Map one level of the pyramid to logits and offsets."""
        hidden_NCHW = self.conv(level_NCHW, relu=True)
        logits, deltas = self.cls_logits, self.bbox_pred
        assert logits.bias is not None
        assert deltas.bias is not None
        # One convolution computes both, because reading and, in backward, writing the hidden features dominates the
        # cost.
        weight, bias_C = torch.cat([logits.weight, deltas.weight]), torch.cat([logits.bias, deltas.bias])
        outputs_NCHW = logits.run(hidden_NCHW, *_filled(weight, bias_C), relu=False)
        parts = outputs_NCHW[:, : len(logits.weight)], outputs_NCHW[:, len(logits.weight) : len(weight)]
        return RpnOutput(*(part.contiguous(memory_format=torch.channels_last) for part in parts))

    def flops(self, sizes: list[Size]) -> list[LayerFlops]:
        """Return the FLOPs per picture of every layer on every level; ``sizes`` are the levels' heights and widths."""
        layers = (("conv", self.conv), ("cls_logits", self.cls_logits), ("bbox_pred", self.bbox_pred))
        return [convolution_flops(name, layer, size) for name, layer in layers for size in sizes]


class RegionLinear(nn.Conv2d):
    """Linear layer with ReLU over all features of a region, as a convolution whose kernel covers the region.

    The flattened weight (outputs, C, S, S) is that of a linear layer over flattened features (C, S, S).

    Args:
        channels, resolution: C and S.
    """

    def __init__(self, channels: int, resolution: int, outputs: int) -> None:
        super().__init__(channels, outputs, resolution)
        self._linear_relu = LINEAR_RELU.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation and return its name; see :meth:`common.nn.choice.Choosing.choose`."""
        request = OperationRequest(self.weight.device, dtype, {"inputs": self.weight[0].numel()})
        self._linear_relu = LINEAR_RELU.select(requested, request)
        return self._linear_relu.name

    def forward(self, x_RCSS: Tensor) -> Tensor:
        """Return (R, outputs)."""
        x_RX, weight_NX = (tensor.permute(0, 2, 3, 1).flatten(1) for tensor in (x_RCSS, self.weight))
        assert self.bias is not None
        y_RN: Tensor = self._linear_relu.function(x_RX, weight_NX, self.bias)
        return y_RN

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, implementation={self._linear_relu.name}"


class BoxHead(nn.Module):
    """Box head: class and box of a region, after two hidden layers (Lin et al., arXiv:1612.03144, section 4.2)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, results = architecture.box_channels, architecture.classes + 1
        self.fc6 = RegionLinear(architecture.pyramid_channels, architecture.box_resolution, hidden)
        self.fc7 = RegionLinear(hidden, 1, hidden)
        self.cls_score = nn.Linear(hidden, results)
        self.bbox_pred = nn.Linear(hidden, results * BOX)

    @torch.no_grad()
    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw uniform weights of variance ``1 / fan in`` in hidden layers, normal ones in outputs; biases are 0."""
        for hidden in (self.fc6, self.fc7):
            nn.init.kaiming_uniform_(hidden.weight, a=1, generator=generator)
        for last, deviation in ((self.cls_score, CLASS_STD), (self.bbox_pred, BOX_STD)):
            last.weight.normal_(0.0, deviation, generator=generator)
        for layer in (self.fc6, self.fc7, self.cls_score, self.bbox_pred):
            _zero_bias(layer)

    def forward(self, x_RCSS: Tensor) -> tuple[Tensor, Tensor]:
        """Return class logits (R, K + 1), background first, and offsets (R, 4 (K + 1)) of the boxes of all classes."""
        y_RN = self.fc7(self.fc6(x_RCSS)[:, :, None, None])
        return self.cls_score(y_RN), self.bbox_pred(y_RN)

    def flops(self, slots: int) -> list[LayerFlops]:
        """Return the FLOPs per picture of every layer, with ``slots`` regions per picture."""
        weights = {
            "fc6": self.fc6.weight,
            "fc7": self.fc7.weight,
            "cls_score": self.cls_score.weight,
            "bbox_pred": self.bbox_pred.weight,
        }
        return [_linear_flops(name, weight, slots) for name, weight in weights.items()]


class Enlarging(FusedConv2d):
    """Transposed 2x2 convolution of stride 2 with ReLU, as a 1x1 convolution to the four resulting pixels.

    Its weight (4 * channels, channels, 1, 1) is that of ``torch.nn.ConvTranspose2d`` (in, out, 2, 2), reordered to
    (row, column, output, input). The four pixels share a bias.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, ENLARGED * ENLARGED * channels, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x_NCHW: Tensor, relu: bool = True, residual_NCHW: Tensor | None = None) -> Tensor:
        """Return (N, 4 * C, H, W), with the four pixels as channels in the order row, column, channel."""
        assert self.bias is not None
        return self.run(x_NCHW, self.weight, self.bias.repeat(ENLARGED * ENLARGED), relu, residual_NCHW)


class MaskHead(nn.Module):
    """Mask head: mask of a region for one class (He et al., arXiv:1703.06870, figure 4, right).

    The published network computes masks of all classes, but loss and detections use only one of them. The last layer
    is therefore computed for this class only.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        channels = architecture.pyramid_channels
        self._resolution = architecture.mask_resolution
        count = architecture.mask_convolutions
        self.convolutions = nn.ModuleDict(
            {f"mask_fcn{n}": FusedConv2d(channels, channels, 3) for n in range(1, count + 1)}
        )
        self.conv5_mask = Enlarging(channels)
        self.mask_fcn_logits = FusedConv2d(channels, architecture.classes + 1, 1)
        self._selected_logits = SELECTED_LOGITS.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation of the last layer, see :meth:`common.nn.choice.Choosing.choose`."""
        request = OperationRequest(
            self.mask_fcn_logits.weight.device, dtype, {"channels": self.mask_fcn_logits.in_channels}
        )
        self._selected_logits = SELECTED_LOGITS.select(requested, request)
        return self._selected_logits.name

    @torch.no_grad()
    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw normal weights of variance ``2 / fan out`` from a CPU generator; biases are 0."""
        for module in self.modules():
            if isinstance(module, FusedConv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
                _zero_bias(module)

    def forward(self, x_RCSS: Tensor, class_R: Tensor) -> Tensor:
        """Return the logits (R, 2 S, 2 S) of each region's class, fp32 (fp64 for fp64 features). S can have any value.

        Args:
            class_R: int64, 0 to K; -1 for slots without a region, which have logits of 0 and no gradient.
        """
        for convolution in self.convolutions.values():
            x_RCSS = convolution(x_RCSS, relu=True)
        regions, channels, height, width = x_RCSS.shape
        # The last layer handles pixels independently. It runs before the four pixels are rearranged, because moving
        # logits costs less than moving features.
        pixels = ENLARGED**2 * height * width
        fine_RPC = self.conv5_mask(x_RCSS).permute(0, 2, 3, 1).reshape(regions, pixels, channels)
        last = self.mask_fcn_logits
        logits_RP: Tensor = self._selected_logits.function(fine_RPC, last.weight.flatten(1), last.bias, class_R)
        cells = logits_RP.view(regions, height, width, ENLARGED, ENLARGED)
        return cells.transpose(2, 3).reshape(regions, ENLARGED * height, ENLARGED * width)

    def flops(self, slots: int) -> list[LayerFlops]:
        """Return the FLOPs per picture of every layer, with ``slots`` regions.

        The last layer counts for all classes, as in the published network.
        """
        size = (self._resolution, self._resolution)
        layers = [
            convolution_flops(name.rpartition(".")[2], layer, size)
            for name, layer in self.named_modules()
            if isinstance(layer, FusedConv2d) and layer is not self.mask_fcn_logits
        ]
        fine = (ENLARGED * self._resolution, ENLARGED * self._resolution)
        layers.append(convolution_flops("mask_fcn_logits", self.mask_fcn_logits, fine))
        return [LayerFlops(layer.name, slots * layer.forward, slots * layer.training) for layer in layers]


def _filled(weight: Tensor, bias_C: Tensor) -> tuple[Tensor, Tensor]:
    """Pad weight and bias with filters of zeros, up to a multiple that is fast."""
    more = padded_columns(len(weight)) - len(weight)
    return F.pad(weight, (0, 0, 0, 0, 0, 0, 0, more)), F.pad(bias_C, (0, more))


def _zero_bias(layer: nn.Conv2d | nn.Linear) -> None:
    assert layer.bias is not None
    layer.bias.zero_()


def _linear_flops(name: str, weight: Tensor, samples: int) -> LayerFlops:
    forward = 2.0 * weight.numel() * samples
    return LayerFlops(name, forward, 3 * forward)
