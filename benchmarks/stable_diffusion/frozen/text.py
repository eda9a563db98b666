"""CLIP's text tower: what the U-Net is conditioned on, and the text's side of the CLIP score.

Shapes: N texts, T tokens, W features of a token, E of the projection. Parameters have OpenCLIP's names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.frozen.freezing import freeze
from benchmarks.stable_diffusion.frozen.sizes import TextSizes
from benchmarks.stable_diffusion.frozen.transformer import Transformer


class TextTower(nn.Module):
    """Tokens to features; frozen.

    Args:
        sizes: of the network.
    """

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
        """What the U-Net attends to: all blocks but the last, and the final norm; padding is encoded as any token.

        Args:
            tokens_NT: integers, T at most the context.

        Returns:
            (N, T, W) in the network's dtype.
        """
        return self._encode(tokens_NT, left_out=1)

    def pooled(self, tokens_NT: Tensor) -> Tensor:
        """Features of the token that ends each text, behind all blocks and the final norm: (N, W)."""
        rows = torch.arange(tokens_NT.shape[0], device=tokens_NT.device)
        end = tokens_NT.argmax(dim=1)  # its id is the largest; the first where a text has it in it
        return self._encode(tokens_NT, left_out=0)[rows, end]

    def project(self, tokens_NT: Tensor) -> Tensor:
        """Embeddings that are compared with those of pictures, not normalised: (N, E)."""
        return self.pooled(tokens_NT) @ self.text_projection

    def _encode(self, tokens_NT: Tensor, left_out: int) -> Tensor:
        x_NTW = self.token_embedding(tokens_NT) + self.positional_embedding[: tokens_NT.shape[1]]
        out: Tensor = self.ln_final(self.transformer(x_NTW, left_out))
        return out
