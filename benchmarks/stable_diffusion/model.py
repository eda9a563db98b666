"""The U-Net of Stable Diffusion v2, for velocity prediction.

Everything is in channels_last memory, where the tokens of a transformer are a view. Parameters have the published
names, except where one weight contains several layers (:mod:`benchmarks.stable_diffusion.published_names`).

Legend: N images, C channels, H height, W width, T tokens of a caption, K features of a token, M features of the keys
and values of all cross-attentions together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.initial_weights import draw_weights
from benchmarks.stable_diffusion.unet_architecture import UNetArchitecture
from benchmarks.stable_diffusion.unet_blocks import (
    CaptionProjections,
    TimeEmbedding,
    TimeProjections,
    UNetBlock,
    UNetOutput,
)
from benchmarks.stable_diffusion.unet_operations import choose_layers, choose_operations


class UNet(nn.Module):
    """The U-Net.

    Args:
        implementations: ``model.implementations``; None for ``auto`` everywhere.
        generator: random generator of the initial weights, which are drawn on its device. None leaves them
            uninitialised, for models that are loaded or only counted.
        device, dtype: device and dtype of all parameters; activations have the same dtype.
        zero_std: see :func:`benchmarks.stable_diffusion.initial_weights.draw_weights`.

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
        """Return names and modules in the order of the forward pass; each reads its parameters only in its own
        forward.
        """
        down = [(f"input_blocks.{number}", block) for number, block in enumerate(self.input_blocks)]
        up = [(f"output_blocks.{number}", block) for number, block in enumerate(self.output_blocks)]
        first = [(name, self.get_submodule(name)) for name in ("caption_projections", "time_embed", "time_projections")]
        return [*first, *down, ("middle_block", self.middle_block), *up, ("out", self.out)]

    def cross_keys_values(self, context_NTK: Tensor) -> Tensor:
        """Return keys and values of all cross-attentions, (N, T, M); they are the same for all steps of a sampler."""
        keys_values_NTM: Tensor = self.caption_projections(context_NTK.to(self._dtype))
        return keys_values_NTM

    def forward(
        self, x_NCHW: Tensor, t_N: Tensor, context_NTK: Tensor | None = None, *, keys_values: Tensor | None = None
    ) -> Tensor:
        """Predict the velocity.

        Args:
            x_NCHW: noised latents.
            t_N: time steps, integers.
            context_NTK: encoded captions.
            keys_values: result of :meth:`cross_keys_values`, instead of ``context_NTK``.

        Returns:
            (N, C, H, W) in channels_last memory, in the dtype of the parameters.

        Raises:
            ValueError: not exactly one of ``context_NTK`` and ``keys_values`` is given.
        """
        if (context_NTK is None) == (keys_values is None):
            raise ValueError("give either the encoded captions or their keys and values")
        if keys_values is None:
            assert context_NTK is not None
            keys_values = self.cross_keys_values(context_NTK)
        added = list(self.time_projections(self.time_embed(t_N)))
        captions = self.caption_projections.pairs(keys_values)

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
