"""The two towers of CLIP (Radford et al. 2021) and their pre-norm transformer. Parameters have OpenCLIP's names.

The text tower conditions the U-Net and embeds captions for the CLIP score. The vision tower embeds pictures for the
CLIP score; it is a ViT (Dosovitskiy et al. 2021) with an additional norm before the blocks, and its names are below
``visual``.

Shapes: N texts, pictures or sequences, H heads, D features of a head, W features of a token, E of the projection. S
tokens of a sequence; of a picture, S = 1 + (resolution / patch)^2. T tokens of a text.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stable_diffusion.frozen.inference import freeze
from benchmarks.stable_diffusion.frozen.sizes import TextSizes, VisionSizes

IMAGE_CHANNELS = 3


class ClipTransformer(nn.Module):
    """Residual blocks of attention and MLP.

    Args:
        width: features per token, W.
        heads: heads per attention.
        mlp: hidden features of an MLP.
        causal: whether tokens attend only to themselves and earlier tokens.
    """

    def __init__(self, width: int, layers: int, heads: int, mlp: int, causal: bool) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(_ClipBlock(width, heads, mlp, causal) for _ in range(layers))

    def forward(self, x_NSW: Tensor, left_out: int = 0) -> Tensor:
        """Run all blocks except the last ``left_out``."""
        for block in self.resblocks[: len(self.resblocks) - left_out]:
            x_NSW = block(x_NSW)
        return x_NSW


class _ClipBlock(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int, causal: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = _ClipAttention(width, heads, causal)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = _Mlp(width, mlp)

    def forward(self, x_NSW: Tensor) -> Tensor:
        x_NSW = x_NSW + self.attn(self.ln_1(x_NSW))
        return x_NSW + self.mlp(self.ln_2(x_NSW))


class _ClipAttention(nn.Module):
    """Attention whose query, key and value come from one product."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        self._heads = heads
        self._causal = causal
        nn.init.normal_(self.in_proj_weight, std=width**-0.5)

    def forward(self, x_NSW: Tensor) -> Tensor:
        qkv = F.linear(x_NSW, self.in_proj_weight, self.in_proj_bias)
        q_NHSD, k_NHSD, v_NHSD = qkv.unflatten(2, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        out_NHSD = _attention(q_NHSD, k_NHSD, v_NHSD, self._causal)
        out: Tensor = self.out_proj(out_NHSD.transpose(1, 2).flatten(2))
        return out


def _attention(q_NHSD: Tensor, k_NHSD: Tensor, v_NHSD: Tensor, causal: bool) -> Tensor:
    """Return ``softmax(q k^T / sqrt(D)) v``; with ``causal``, a token attends only to itself and earlier tokens.

    PyTorch's fp32 attention takes three eighths of a ViT-H's time. Where TF32 is allowed, fp16 operands are used
    instead: they have the same mantissa, and sums are in fp32 as well.
    """
    if q_NHSD.dtype == torch.float32 and q_NHSD.is_cuda and torch.get_float32_matmul_precision() != "highest":
        half = F.scaled_dot_product_attention(q_NHSD.half(), k_NHSD.half(), v_NHSD.half(), is_causal=causal)
        return half.float()
    return F.scaled_dot_product_attention(q_NHSD, k_NHSD, v_NHSD, is_causal=causal)


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, hidden)
        self.c_proj = nn.Linear(hidden, width)

    def forward(self, x_NSW: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x_NSW)))
        return out


class TextTower(nn.Module):
    """Frozen network that maps tokens to features."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.token_embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positional_embedding = nn.Parameter(torch.empty(sizes.context, sizes.width))
        self.transformer = ClipTransformer(sizes.width, sizes.layers, sizes.heads, sizes.mlp, causal=True)
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
        self.transformer = ClipTransformer(sizes.width, sizes.layers, sizes.heads, sizes.mlp, causal=False)
        self.ln_post = nn.LayerNorm(sizes.width)
        self.proj = nn.Parameter(torch.empty(sizes.width, sizes.embedding))
        for parameter in (self.class_embedding, self.positional_embedding, self.proj):
            nn.init.normal_(parameter, std=sizes.width**-0.5)
        freeze(self)

    def pooled(self, pixels_N3HW: Tensor) -> Tensor:
        """Return the features of the class token after all blocks and the last norm: (N, W) in the network's dtype.

        Args:
            pixels_N3HW: normalised, in the network's dtype, H = W = ``sizes.resolution``.
        """
        patches_NSW = self.conv1(pixels_N3HW).flatten(2).mT
        first_N1W = self.class_embedding.expand(patches_NSW.shape[0], 1, -1)
        x_NSW = torch.cat([first_N1W, patches_NSW], dim=1) + self.positional_embedding
        out: Tensor = self.ln_post(self.transformer(self.ln_pre(x_NSW))[:, 0])
        return out

    def project(self, pixels_N3HW: Tensor) -> Tensor:
        """Return embeddings (N, E), not normalised, to compare with those of texts; see :meth:`pooled`."""
        return self.pooled(pixels_N3HW) @ self.proj
