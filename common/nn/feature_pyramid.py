"""Feature pyramid network (Lin et al., arXiv:1612.03144): feature maps with equal channels from the stages of a trunk.

Parameters are named ``inner_blocks.i``, ``layer_blocks.i``, ``extra_blocks.p6`` and ``extra_blocks.p7``, where stage
i = 0 is the finest. Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.nn.convolution import LayerFlops, Size, convolution_flops, result_size
from common.nn.fused_convolution import FusedConv2d

Extra = Literal["convolutions", "max_pool", "none"]
"""Levels above the coarsest stage.

- ``convolutions``: two 3x3 convolutions of stride 2, with ReLU between them (RetinaNet, arXiv:1708.02002, section 4).
- ``max_pool``: one level with every second pixel (Lin et al.).
- ``none``: no further levels.
"""


class FeaturePyramid(nn.Module):
    """Feature pyramid: a 1x1 convolution per stage, plus the coarser level upsampled by two; then a 3x3 convolution.

    Args:
        in_channels: channels of the stages, from the finest to the coarsest.
    """

    def __init__(self, in_channels: Sequence[int], channels: int, extra: Extra) -> None:
        super().__init__()
        self.inner_blocks = nn.ModuleList(FusedConv2d(wide, channels, 1) for wide in in_channels)
        self.layer_blocks = nn.ModuleList(FusedConv2d(channels, channels, 3) for _ in in_channels)
        self.extra_blocks = nn.ModuleDict()
        if extra == "convolutions":
            self.extra_blocks.update({name: FusedConv2d(channels, channels, 3, stride=2) for name in ("p6", "p7")})
        self._extra = extra

    @torch.no_grad()
    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw uniform weights of variance ``1 / fan_in`` from a CPU generator, and set biases to zero."""
        for module in self.modules():
            if isinstance(module, FusedConv2d):
                nn.init.kaiming_uniform_(module.weight, a=1, generator=generator)
                assert module.bias is not None
                module.bias.zero_()

    def forward(self, stages_NCHW: Sequence[Tensor]) -> list[Tensor]:
        """Return the levels, (N, C, H, W) each: one per stage, then extra ones. The lists start with the finest."""
        laterals = list(zip(stages_NCHW, self.inner_blocks, self.layer_blocks, strict=True))
        levels: list[Tensor] = []
        inner_NCHW: Tensor | None = None
        for stage_NCHW, inner, layer in reversed(laterals):
            if inner_NCHW is not None:
                inner_NCHW = F.interpolate(inner_NCHW, size=stage_NCHW.shape[2:], mode="nearest")
            inner_NCHW = inner(stage_NCHW, residual_NCHW=inner_NCHW)
            levels.insert(0, layer(inner_NCHW))
        if self._extra == "convolutions":
            p6_NCHW = self.extra_blocks["p6"](levels[-1])
            levels += [p6_NCHW, self.extra_blocks["p7"](F.relu(p6_NCHW))]
        elif self._extra == "max_pool":
            # Equal to max pooling with kernel 1 and stride 2, but needs no indices and no atomics in the gradient.
            levels.append(levels[-1][:, :, ::2, ::2].contiguous(memory_format=torch.channels_last))
        return levels

    def flops(self, sizes: Sequence[Size], input_gradients: Sequence[bool]) -> tuple[list[LayerFlops], list[Size]]:
        """Return the FLOPs of every convolution for one image, and height and width of each level.

        Args:
            sizes: height and width of each stage's output.
            input_gradients: whether the gradient of each stage's output is needed.
        """
        layers = []
        levels = list(sizes)
        for name, module in self.named_modules():
            kind, _, index = name.partition(".")
            if not isinstance(module, FusedConv2d):
                continue
            if kind == "inner_blocks":
                layers.append(convolution_flops(name, module, sizes[int(index)], input_gradients[int(index)]))
            elif kind == "layer_blocks":
                layers.append(convolution_flops(name, module, sizes[int(index)]))
            else:
                layers.append(convolution_flops(name, module, levels[-1]))
                levels.append(result_size(module, levels[-1]))
        if self._extra == "max_pool":
            height, width = levels[-1]
            levels.append(((height - 1) // 2 + 1, (width - 1) // 2 + 1))
        return layers, levels
