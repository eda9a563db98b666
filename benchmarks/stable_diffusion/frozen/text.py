"""CLIP's text tower: it conditions the U-Net, and embeds captions for the CLIP score.

Shapes: N texts, T tokens, W features of a token, E of the projection. Parameters have OpenCLIP's names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.frozen.freezing import freeze
from benchmarks.stable_diffusion.frozen.sizes import TextSizes
from benchmarks.stable_diffusion.frozen.transformer import Transformer


class TextTower(nn.Module):
    """Frozen network that maps tokens to features."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.token_embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positional_embedding = nn.Parameter(torch.empty(sizes.context, sizes.width))
        self.transformer = Transformer(sizes.width, sizes.layers, sizes.heads, sizes.mlp, causal=True)
        self.ln_final = nn.LayerNorm(sizes.width)
        self.text_projection = nn.Parameter(torch.empty(sizes.width, sizes.embedding))
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        nn.init.normal_(self.text_projection, std=sizes.width**-0.5)
        freeze(self)

    def encode(self, tokens_NT: Tensor) -> Tensor:
        """Return the features that condition the U-Net: all blocks except the last, then the final norm.

        Args:
            tokens_NT: integers, T at most ``sizes.context``; padding is encoded like any token.

        Returns:
            (N, T, W) in the network's dtype.
        """
        return self._encode(tokens_NT, left_out=1)

    def pooled(self, tokens_NT: Tensor) -> Tensor:
        """Return the features (N, W) of the end token of each text, after all blocks and the final norm."""
        rows = torch.arange(tokens_NT.shape[0], device=tokens_NT.device)
        end = tokens_NT.argmax(dim=1)  # the end token has the largest id; argmax returns the first one
        return self._encode(tokens_NT, left_out=0)[rows, end]

    def project(self, tokens_NT: Tensor) -> Tensor:
        """Return embeddings (N, E), not normalised, to compare with those of pictures."""
        return self.pooled(tokens_NT) @ self.text_projection

    def _encode(self, tokens_NT: Tensor, left_out: int) -> Tensor:
        x_NTW = self.token_embedding(tokens_NT) + self.positional_embedding[: tokens_NT.shape[1]]
        out: Tensor = self.ln_final(self.transformer(x_NTW, left_out))
        return out
