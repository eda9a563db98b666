"""Feature pyramid network (Lin et al., arXiv:1612.03144): maps of equal depth from the stages of a trunk.

Parameters are named ``inner_blocks.i``, ``layer_blocks.i`` and ``extra_blocks.p6`` and ``p7``, i counting the stages
from the finest. Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.nn.convolution_flops import LayerFlops, Size, convolution_flops, result_size
from common.nn.fused_convolution import FusedConv2d

Extra = Literal["convolutions", "max_pool", "none"]
"""Levels above the coarsest stage: two by 3x3 convolutions of stride 2, the second of which sees the first through ReLU
(RetinaNet, arXiv:1708.02002, section 4); one that takes every second pixel (Lin et al.); or none."""


class FeaturePyramid(nn.Module):
    """A 1x1 convolution of every stage, added to the coarser level's twice enlarged (nearest), then a 3x3 convolution.

    Args:
        in_channels: C of the stages, from the finest.
        channels: C of every level.
        extra: levels above the coarsest stage.
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
        """Uniform weights of variance ``1 / fan in``, and no bias, from a CPU generator."""
        for module in self.modules():
            if isinstance(module, FusedConv2d):
                nn.init.kaiming_uniform_(module.weight, a=1, generator=generator)
                assert module.bias is not None
                module.bias.zero_()

    def forward(self, stages_NCHW: Sequence[Tensor]) -> list[Tensor]:
        """Map the stages' outputs, from the finest, to the levels, from the finest."""
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
            # What max pooling over single pixels gives, without its indices and the atomics of its gradient.
            levels.append(levels[-1][:, :, ::2, ::2].contiguous(memory_format=torch.channels_last))
        return levels

    def flops(self, sizes: Sequence[Size], input_gradients: Sequence[bool]) -> tuple[list[LayerFlops], list[Size]]:
        """FLOPs of every convolution for one picture, and the height and width of each level.

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
