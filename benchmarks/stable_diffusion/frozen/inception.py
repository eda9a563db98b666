"""The Inception network of FID: Inception-v3 (Szegedy et al. 2016), for TensorFlow's weights of 2015-12-05.

It differs from torchvision's network in its pooling branches: averages exclude the padding, and the last block uses
maxima. Parameters have the names of the published file, whose classifier (``fc``) is not included here.

Shapes: N pictures, H and W pixels, C channels, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stable_diffusion.frozen.inference import freeze

BN_EPSILON = 1e-3
IMAGE_CHANNELS = 3


class Inception(nn.Module):
    """Frozen network that maps pictures to the features whose statistics FID compares.

    Args:
        width_factor: multiplier of all channels; 1 for the published network.
        resolution: height and width that pictures are resized to, px; at least 75.
    """

    def __init__(self, width_factor: float = 1.0, resolution: int = 299) -> None:
        super().__init__()
        self.resolution = resolution
        scaled = _Widths(width_factor)
        self.Conv2d_1a_3x3 = _NormedConvolution(IMAGE_CHANNELS, scaled(32), 3, stride=2)
        self.Conv2d_2a_3x3 = _NormedConvolution(scaled(32), scaled(32), 3)
        self.Conv2d_2b_3x3 = _NormedConvolution(scaled(32), scaled(64), 3, padding=1)
        self.Conv2d_3b_1x1 = _NormedConvolution(scaled(64), scaled(80), 1)
        self.Conv2d_4a_3x3 = _NormedConvolution(scaled(80), scaled(192), 3)
        self.Mixed_5b = _BlockA(scaled(192), scaled, scaled(32))
        self.Mixed_5c = _BlockA(self.Mixed_5b.out, scaled, scaled(64))
        self.Mixed_5d = _BlockA(self.Mixed_5c.out, scaled, scaled(64))
        self.Mixed_6a = _BlockB(self.Mixed_5d.out, scaled)
        self.Mixed_6b = _BlockC(self.Mixed_6a.out, scaled, scaled(128))
        self.Mixed_6c = _BlockC(self.Mixed_6b.out, scaled, scaled(160))
        self.Mixed_6d = _BlockC(self.Mixed_6c.out, scaled, scaled(160))
        self.Mixed_6e = _BlockC(self.Mixed_6d.out, scaled, scaled(192))
        self.Mixed_7a = _BlockD(self.Mixed_6e.out, scaled)
        self.Mixed_7b = _BlockE(self.Mixed_7a.out, scaled, pool_maxima=False)
        self.Mixed_7c = _BlockE(self.Mixed_7b.out, scaled, pool_maxima=True)
        self.out = self.Mixed_7c.out
        """Features F: 2,048 at width 1."""
        freeze(self)

    def features(self, images_N3HW: Tensor) -> Tensor:
        """Return the features of pictures: (N, F) in the network's dtype.

        Args:
            images_N3HW: in [0, 1], of any size, floating-point; they are resized in float32.
        """
        size = (self.resolution, self.resolution)
        resized = F.interpolate(images_N3HW.float(), size=size, mode="bilinear", align_corners=False)
        weight = self.Conv2d_1a_3x3.conv.weight
        return self.trunk((2 * resized - 1).to(weight.dtype))

    def trunk(self, x_N3HW: Tensor) -> Tensor:
        """Return the features (N, F) of pictures in [-1, 1] that have the network's resolution."""
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x_N3HW)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(_shrunk(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(_shrunk(x))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        out: Tensor = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x))).mean(dim=(2, 3))
        return out


class _Widths:
    """Function that scales a number of channels, with a minimum of 1."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, channels: int) -> int:
        return max(1, round(channels * self._factor))


class _NormedConvolution(nn.Module):
    """Convolution without bias, then batch norm and ReLU."""

    def __init__(
        self,
        channels: int,
        out: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.out = out
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=BN_EPSILON)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x_NCHW)))


def _pointwise(channels: int, out: int) -> _NormedConvolution:
    return _NormedConvolution(channels, out, 1)


def _square(channels: int, out: int, size: int = 3) -> _NormedConvolution:
    return _NormedConvolution(channels, out, size, padding=size // 2)


def _row(channels: int, out: int, size: int) -> _NormedConvolution:
    return _NormedConvolution(channels, out, (1, size), padding=(0, size // 2))


def _column(channels: int, out: int, size: int) -> _NormedConvolution:
    return _NormedConvolution(channels, out, (size, 1), padding=(size // 2, 0))


def _shrunk(x_NCHW: Tensor) -> Tensor:
    return F.max_pool2d(x_NCHW, 3, stride=2)


def _mean_without_padding(x_NCHW: Tensor) -> Tensor:
    return F.avg_pool2d(x_NCHW, 3, stride=1, padding=1, count_include_pad=False)


class _BlockA(nn.Module):
    def __init__(self, channels: int, scaled: _Widths, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = _pointwise(channels, scaled(64))
        self.branch5x5_1 = _pointwise(channels, scaled(48))
        self.branch5x5_2 = _square(scaled(48), scaled(64), 5)
        self.branch3x3dbl_1 = _pointwise(channels, scaled(64))
        self.branch3x3dbl_2 = _square(scaled(64), scaled(96))
        self.branch3x3dbl_3 = _square(scaled(96), scaled(96))
        self.branch_pool = _pointwise(channels, pooled)
        self.out = 2 * scaled(64) + scaled(96) + pooled

    def forward(self, x_NCHW: Tensor) -> Tensor:
        branches = [
            self.branch1x1(x_NCHW),
            self.branch5x5_2(self.branch5x5_1(x_NCHW)),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x_NCHW))),
            self.branch_pool(_mean_without_padding(x_NCHW)),
        ]
        return torch.cat(branches, dim=1)


class _BlockB(nn.Module):
    def __init__(self, channels: int, scaled: _Widths) -> None:
        super().__init__()
        self.branch3x3 = _NormedConvolution(channels, scaled(384), 3, stride=2)
        self.branch3x3dbl_1 = _pointwise(channels, scaled(64))
        self.branch3x3dbl_2 = _square(scaled(64), scaled(96))
        self.branch3x3dbl_3 = _NormedConvolution(scaled(96), scaled(96), 3, stride=2)
        self.out = scaled(384) + scaled(96) + channels

    def forward(self, x_NCHW: Tensor) -> Tensor:
        doubled = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x_NCHW)))
        return torch.cat([self.branch3x3(x_NCHW), doubled, _shrunk(x_NCHW)], dim=1)


class _BlockC(nn.Module):
    def __init__(self, channels: int, scaled: _Widths, inner: int) -> None:
        super().__init__()
        self.branch1x1 = _pointwise(channels, scaled(192))
        self.branch7x7_1 = _pointwise(channels, inner)
        self.branch7x7_2 = _row(inner, inner, 7)
        self.branch7x7_3 = _column(inner, scaled(192), 7)
        self.branch7x7dbl_1 = _pointwise(channels, inner)
        self.branch7x7dbl_2 = _column(inner, inner, 7)
        self.branch7x7dbl_3 = _row(inner, inner, 7)
        self.branch7x7dbl_4 = _column(inner, inner, 7)
        self.branch7x7dbl_5 = _row(inner, scaled(192), 7)
        self.branch_pool = _pointwise(channels, scaled(192))
        self.out = 4 * scaled(192)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        doubled = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x_NCHW)))
        branches = [
            self.branch1x1(x_NCHW),
            self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x_NCHW))),
            self.branch7x7dbl_5(self.branch7x7dbl_4(doubled)),
            self.branch_pool(_mean_without_padding(x_NCHW)),
        ]
        return torch.cat(branches, dim=1)


class _BlockD(nn.Module):
    def __init__(self, channels: int, scaled: _Widths) -> None:
        super().__init__()
        self.branch3x3_1 = _pointwise(channels, scaled(192))
        self.branch3x3_2 = _NormedConvolution(scaled(192), scaled(320), 3, stride=2)
        self.branch7x7x3_1 = _pointwise(channels, scaled(192))
        self.branch7x7x3_2 = _row(scaled(192), scaled(192), 7)
        self.branch7x7x3_3 = _column(scaled(192), scaled(192), 7)
        self.branch7x7x3_4 = _NormedConvolution(scaled(192), scaled(192), 3, stride=2)
        self.out = scaled(320) + scaled(192) + channels

    def forward(self, x_NCHW: Tensor) -> Tensor:
        branches = [
            self.branch3x3_2(self.branch3x3_1(x_NCHW)),
            self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x_NCHW)))),
            _shrunk(x_NCHW),
        ]
        return torch.cat(branches, dim=1)


class _BlockE(nn.Module):
    def __init__(self, channels: int, scaled: _Widths, pool_maxima: bool) -> None:
        super().__init__()
        self._pool_maxima = pool_maxima
        self.branch1x1 = _pointwise(channels, scaled(320))
        self.branch3x3_1 = _pointwise(channels, scaled(384))
        self.branch3x3_2a = _row(scaled(384), scaled(384), 3)
        self.branch3x3_2b = _column(scaled(384), scaled(384), 3)
        self.branch3x3dbl_1 = _pointwise(channels, scaled(448))
        self.branch3x3dbl_2 = _square(scaled(448), scaled(384))
        self.branch3x3dbl_3a = _row(scaled(384), scaled(384), 3)
        self.branch3x3dbl_3b = _column(scaled(384), scaled(384), 3)
        self.branch_pool = _pointwise(channels, scaled(192))
        self.out = scaled(320) + 4 * scaled(384) + scaled(192)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        single = self.branch3x3_1(x_NCHW)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x_NCHW))
        if self._pool_maxima:
            pooled = F.max_pool2d(x_NCHW, 3, stride=1, padding=1)
        else:
            pooled = _mean_without_padding(x_NCHW)
        branches = [
            self.branch1x1(x_NCHW),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pooled),
        ]
        return torch.cat(branches, dim=1)
