"""The U-Net of Stable Diffusion v2, for velocity prediction.

Everything is in channels_last memory, where the tokens of a transformer are a view. Parameters have the published
names, except where one weight contains several layers: queries, keys and values of a self-attention; keys and values of
all cross-attentions; and the time projections of all residual blocks.

Initial weights follow PyTorch's defaults: linear layers and convolutions are uniform within +-1 / sqrt(fan-in), norms
are 1 and 0. The last layer of each residual branch and of the network is zero (weight and bias), so the network first
predicts 0.

Legend: N images, C channels, H height, W width, T tokens of a caption, K features of a token, M features of the keys
and values of all cross-attentions together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.unet_architecture import Residual, UNetArchitecture
from benchmarks.stable_diffusion.unet_blocks import (
    CaptionProjections,
    TimeEmbedding,
    TimeProjections,
    UNetBlock,
    UNetOutput,
)
from benchmarks.stable_diffusion.unet_operations import choose_layers, choose_operations
from common.nn.convolution import UpsampleConvolution
from common.nn.group_norm import GroupNorm, LayerNorm


class UNet(nn.Module):
    """The U-Net.

    Args:
        implementations: ``model.implementations``; None for ``auto`` everywhere.
        generator: random generator of the initial weights, which are drawn on its device. None leaves them
            uninitialised, for models that are loaded or only counted.
        device, dtype: device and dtype of all parameters; activations have the same dtype.
        zero_std: standard deviation of normal values that replace zeros of the initial weights; 0 keeps the zeros.

    Attributes:
        chosen: names of the chosen implementations by operation.

    Raises:
        UnsupportedImplementation: names ``model.implementations.<operation>``.
    """

    def __init__(
        self,
        architecture: UNetArchitecture,
        implementations: Mapping[str, str] | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        zero_std: float = 0.0,
    ) -> None:
        super().__init__()
        device, requested = torch.device(device), implementations or {}
        self.architecture = architecture
        self._dtype = dtype
        operations = choose_operations(requested, architecture, device, dtype)
        self.chosen = dict(operations.choices)
        with torch.device("meta"):  # so that the global generator is not used
            self.time_embed = TimeEmbedding(architecture.model_channels, architecture.time_width, device, dtype)
            self.time_projections = TimeProjections(architecture)
            self.caption_projections = CaptionProjections(architecture)
            self.input_blocks = nn.ModuleList(UNetBlock(p, architecture, operations) for p in architecture.input_blocks)
            self.middle_block = UNetBlock(architecture.middle_block, architecture, operations)
            self.output_blocks = nn.ModuleList(
                UNetBlock(p, architecture, operations) for p in architecture.output_blocks
            )
            self.out = UNetOutput(architecture)
        self.to(dtype=dtype).to(memory_format=torch.channels_last)
        self.to_empty(device=device)
        self.chosen |= choose_layers(self, requested, dtype)
        if generator is not None:
            draw_weights(self, architecture, generator, zero_std)

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Return names and modules in the order of the forward pass. Only their own forward reads their parameters."""
        down = [(f"input_blocks.{number}", block) for number, block in enumerate(self.input_blocks)]
        up = [(f"output_blocks.{number}", block) for number, block in enumerate(self.output_blocks)]
        first = [(name, self.get_submodule(name)) for name in ("caption_projections", "time_embed", "time_projections")]
        return [*first, *down, ("middle_block", self.middle_block), *up, ("out", self.out)]

    def cross_keys_values(self, context_NTK: Tensor) -> Tensor:
        """Return keys and values of all cross-attentions, (N, T, M); they are the same for all steps of a sampler."""
        keys_values_NTM: Tensor = self.caption_projections(context_NTK.to(self._dtype))
        return keys_values_NTM

    def forward(self, x_NCHW: Tensor, t_N: Tensor, context_NTK: Tensor) -> Tensor:
        """Predict the velocity.

        Args:
            x_NCHW: noised latents.
            t_N: time steps, integers.
            context_NTK: encoded captions.

        Returns:
            (N, C, H, W) in channels_last memory, in the dtype of the parameters.
        """
        return self.velocity(x_NCHW, t_N, self.cross_keys_values(context_NTK))

    def velocity(self, x_NCHW: Tensor, t_N: Tensor, keys_values_NTM: Tensor) -> Tensor:
        """Return the velocity (N, C, H, W), like :meth:`forward`, from the result of :meth:`cross_keys_values`."""
        added = list(self.time_projections(self.time_embed(t_N)))
        captions = self.caption_projections.pairs(keys_values_NTM)

        plans = iter(self.architecture.blocks)

        def run(block: nn.Module, *inputs: Tensor) -> Tensor:
            """Run the next block with its time embeddings, keys and values."""
            plan = next(plans)
            mine, of_captions = added[: plan.residuals], captions[: plan.transformers]
            del added[: plan.residuals], captions[: plan.transformers]
            result: Tensor = block(inputs, mine, of_captions)
            return result

        h_NCHW = x_NCHW.to(self._dtype, memory_format=torch.channels_last)
        skips = []
        for block in self.input_blocks:
            h_NCHW = run(block, h_NCHW)
            skips.append(h_NCHW)
        h_NCHW = run(self.middle_block, h_NCHW)
        for block in self.output_blocks:
            h_NCHW = run(block, h_NCHW, skips.pop())
        v_NCHW: Tensor = self.out(h_NCHW)
        return v_NCHW


ZERO_AT_FIRST = (".out_layers.3", ".proj_out", "out.2")
"""Name suffixes of the layers that start at zero."""

Drawn = nn.Linear | nn.Conv2d | UpsampleConvolution | TimeProjections | CaptionProjections


@torch.no_grad()
def draw_weights(model: nn.Module, architecture: UNetArchitecture, generator: torch.Generator, zero_std: float) -> None:
    """Initialise all parameters.

    Args:
        generator: random generator; numbers are drawn on its device in fp32.
        zero_std: standard deviation of normal values in the layers of :data:`ZERO_AT_FIRST`, so that measured speed is
            that of a later stage of training; 0 keeps their zeros. Biases of norms are always 0.
    """
    for name, module in model.named_modules():
        if isinstance(module, GroupNorm | LayerNorm):
            module.weight.fill_(1.0)
            module.bias.zero_()
        elif isinstance(module, Drawn):
            starts_from_zero = name.endswith(ZERO_AT_FIRST)
            for parameter in (module.weight, getattr(module, "bias", None)):
                if parameter is None:
                    continue
                if starts_from_zero:
                    _normal(parameter, zero_std, generator)
                else:
                    _uniform(parameter, module.weight[0].numel(), generator)
        if isinstance(module, TimeProjections):
            # This module has the biases of the blocks' first 3x3 convolutions, whose fan-in is 9 times the inputs.
            parts = module.convolution_bias.split(module.rows.counts)
            for part, (_, layer) in zip(parts, architecture.named(Residual), strict=True):
                assert isinstance(layer, Residual)
                _uniform(part, 9 * sum(layer.inputs), generator)


def _uniform(target: Tensor, fan_in: int, generator: torch.Generator) -> None:
    bound = 1.0 / math.sqrt(fan_in)
    drawn = torch.empty(target.shape, device=generator.device)
    target.copy_(drawn.uniform_(-bound, bound, generator=generator))


def _normal(target: Tensor, std: float, generator: torch.Generator) -> None:
    if std == 0.0:
        target.zero_()
        return
    target.copy_(torch.empty(target.shape, device=generator.device).normal_(0.0, std, generator=generator))
