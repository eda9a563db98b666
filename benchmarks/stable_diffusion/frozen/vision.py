"""CLIP's vision tower for the CLIP score: a ViT (Dosovitskiy et al. 2021) with an additional norm before the blocks.

Shapes: N pictures, S = 1 + (resolution / patch)^2 tokens, W features of a token, E of the projection. Parameters have
OpenCLIP's names, below ``visual``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.frozen.freezing import freeze
from benchmarks.stable_diffusion.frozen.sizes import VisionSizes
from benchmarks.stable_diffusion.frozen.transformer import Transformer

IMAGE_CHANNELS = 3


class VisionTower(nn.Module):
    """Frozen network that maps pictures to embeddings."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.sizes = sizes
        tokens = 1 + (sizes.resolution // sizes.patch) ** 2
        self.conv1 = nn.Conv2d(IMAGE_CHANNELS, sizes.width, sizes.patch, stride=sizes.patch, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(sizes.width))
        self.positional_embedding = nn.Parameter(torch.empty(tokens, sizes.width))
        self.ln_pre = nn.LayerNorm(sizes.width)
        self.transformer = Transformer(sizes.width, sizes.layers, sizes.heads, sizes.mlp, causal=False)
        self.ln_post = nn.LayerNorm(sizes.width)
        self.proj = nn.Parameter(torch.empty(sizes.width, sizes.embedding))
        for parameter in (self.class_embedding, self.positional_embedding, self.proj):
            nn.init.normal_(parameter, std=sizes.width**-0.5)
        freeze(self)

    def pooled(self, pixels_N3HW: Tensor) -> Tensor:
        """Return the features of the class token after all blocks and the last norm.

        Args:
            pixels_N3HW: normalised, in the network's dtype, H = W = ``sizes.resolution``.

        Returns:
            (N, W) in the network's dtype.
        """
        patches_NSW = self.conv1(pixels_N3HW).flatten(2).mT
        first_N1W = self.class_embedding.expand(patches_NSW.shape[0], 1, -1)
        x_NSW = torch.cat([first_N1W, patches_NSW], dim=1) + self.positional_embedding
        out: Tensor = self.ln_post(self.transformer(self.ln_pre(x_NSW))[:, 0])
        return out

    def project(self, pixels_N3HW: Tensor) -> Tensor:
        """Return embeddings (N, E), not normalised, to compare with those of texts; see :meth:`pooled`."""
        return self.pooled(pixels_N3HW) @ self.proj
