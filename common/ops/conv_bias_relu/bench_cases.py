"""The convolutions of RetinaNet with a ResNeXt-50 trunk, each once, in every implementation."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops import conv_bias_relu
from common.ops.bench import cases
from common.ops.bench import detection as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep


class Layer(NamedTuple):
    """A convolution: channels in and out, places along a side of its result, and what follows it."""

    name: str
    channels: int
    filters: int
    places: int
    kernel: int
    stride: int = 1
    groups: int = 1
    relu: bool = True
    added: bool = False
    trained_bias: bool = False

    def sizes(self) -> dict[str, int]:
        """Of the request."""
        return {
            "channels": self.channels,
            "filters": self.filters,
            "kernel": self.kernel,
            "stride": self.stride,
            "groups": self.groups,
        }


GROUPS = 32
GROUPED = (
    Layer("grouped layer2.0", 256, 256, 100, 3, stride=2, groups=GROUPS),
    Layer("grouped layer2", 256, 256, 100, 3, groups=GROUPS),
    Layer("grouped layer3.0", 512, 512, 50, 3, stride=2, groups=GROUPS),
    Layer("grouped layer3", 512, 512, 50, 3, groups=GROUPS),
    Layer("grouped layer4.0", 1024, 1024, 25, 3, stride=2, groups=GROUPS),
    Layer("grouped layer4", 1024, 1024, 25, 3, groups=GROUPS),
)
LAYERS = (
    Layer("conv1 layer2", 512, 256, 100, 1),
    Layer("conv1 layer3", 1024, 512, 50, 1),
    Layer("conv1 layer4", 2048, 1024, 25, 1),
    Layer("conv3 layer2", 256, 512, 100, 1, added=True),
    Layer("conv3 layer3", 512, 1024, 50, 1, added=True),
    Layer("conv3 layer4", 1024, 2048, 25, 1, added=True),
    *GROUPED,
    Layer("pyramid", 256, 256, 100, 3, relu=False, trained_bias=True),
    *(Layer(f"head {places}", 256, 256, places, 3, trained_bias=True) for places in size.LEVELS),
)
STEM = (
    Layer("stem", 3, 64, 400, 7, stride=2),
    Layer("grouped layer1", 128, 128, 200, 3, groups=GROUPS),
)
"""Frozen: forward only."""


def _tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=cases.DEVICE).to(dtype).contiguous(memory_format=torch.channels_last)


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype, *, layer: Layer) -> list[Pass]:
    """Both directions of a trained layer."""
    places = layer.places * layer.stride
    x = _tensor(dtype, size.PICTURES, layer.channels, places, places)
    weight = _tensor(dtype, layer.filters, layer.channels // layer.groups, layer.kernel, layer.kernel) / layer.kernel
    bias = torch.randn(layer.filters, device=cases.DEVICE).to(dtype)
    y_shape = size.PICTURES, layer.filters, layer.places, layer.places
    residual = _tensor(dtype, *y_shape) if layer.added else None
    rest = layer.stride, layer.kernel // 2, layer.groups, layer.relu, residual

    x_bytes, y_bytes = (float(math.prod(shape) * dtype.itemsize) for shape in (x.shape, y_shape))
    flops = 2.0 * size.PICTURES * layer.places**2 * weight.numel()
    forward = x_bytes + (2 if layer.added else 1) * y_bytes
    if layer in STEM:
        return [Pass("forward", torch.no_grad()(lambda: function(x, weight, bias, *rest)), forward, flops)]
    inputs = [x, weight, *([bias] if layer.trained_bias else []), *([] if residual is None else [residual])]
    for value in inputs:
        value.requires_grad_()
    # the gradient and the mask are read, x is read and its gradient written
    backward = 2 * x_bytes + (2 if layer.relu else 1) * y_bytes
    return both_ways(
        lambda: function(x, weight, bias, *rest),
        inputs,
        [_tensor(dtype, *y_shape)],
        moved=(forward, backward),
        flops=(flops, 2 * flops),
    )


def entries() -> list[Entry]:
    """Every implementation of every layer."""
    return [
        entry
        for layer in (*STEM, *LAYERS)
        for entry in each(
            f"conv_bias_relu {layer.name}",
            conv_bias_relu.CONV_BIAS_RELU,
            "cudnn",
            layer.sizes(),
            functools.partial(case, layer=layer),
            calls=0,
        )
    ]


def sweeps() -> dict[str, Sweep]:
    """Tiles of the passes around a convolution, and of grouped convolutions."""
    from common.ops.conv_bias_relu import grouped, triton

    tiles = list(itertools.product((64, 128, 256), (2048, 4096, 8192), (4, 8), (4, 8), (1, 2, 3)))
    head = next(layer for layer in LAYERS if layer.name == "head 100")
    wide = next(layer for layer in LAYERS if layer.name == "grouped layer2")
    around = functools.partial(case, conv_bias_relu.CONV_BIAS_RELU.function("epilogue"), size.PICTURES, layer=head)
    inside = functools.partial(case, conv_bias_relu.CONV_BIAS_RELU.function("triton"), size.PICTURES, layer=wide)
    shapes = list(itertools.product((64, 128, 256), (32, 64), (4, 8)))
    found = {
        f"conv_bias_relu {key}": Sweep(triton.TILES, key, tiles, around, key == "gradient") for key in triton.TILES
    }
    for key in grouped.TILES:
        choices = [(*shape, programs) for shape in shapes for programs in ((2, 4, 8) if key == "weight" else (0,))]
        found[f"conv_bias_relu grouped {key}"] = Sweep(grouped.TILES, key, choices, inside, key != "forward")
    return found
