"""Pre-norm transformer of both CLIP towers (Radford et al. 2021); parameters have OpenCLIP's names.

Shapes: N sequences, S tokens, W features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stable_diffusion.frozen.tf32 import attention


class Transformer(nn.Module):
    """Residual blocks of attention and MLP.

    Args:
        width: features per token, W.
        layers: number of blocks.
        heads: heads per attention.
        mlp: hidden features of an MLP.
        causal: whether tokens attend only to themselves and earlier tokens.
    """

    def __init__(self, width: int, layers: int, heads: int, mlp: int, causal: bool) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(_Block(width, heads, mlp, causal) for _ in range(layers))

    def forward(self, x_NSW: Tensor, left_out: int = 0) -> Tensor:
        """Run all blocks except the last ``left_out``."""
        for block in self.resblocks[: len(self.resblocks) - left_out]:
            x_NSW = block(x_NSW)
        return x_NSW


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int, causal: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = _Attention(width, heads, causal)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = _Mlp(width, mlp)

    def forward(self, x_NSW: Tensor) -> Tensor:
        x_NSW = x_NSW + self.attn(self.ln_1(x_NSW))
        return x_NSW + self.mlp(self.ln_2(x_NSW))


class _Attention(nn.Module):
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
        out_NHSD = attention(q_NHSD, k_NHSD, v_NHSD, self._causal)
        out: Tensor = self.out_proj(out_NHSD.transpose(1, 2).flatten(2))
        return out


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, hidden)
        self.c_proj = nn.Linear(hidden, width)

    def forward(self, x_NSW: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x_NSW)))
        return out
