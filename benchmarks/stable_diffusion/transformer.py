"""The transformer of the U-Net. Spatial positions are tokens; in channels_last memory this is a view.

Where possible, biases are added by the next operation that reads the product (layer norm with residual, GEGLU).

Legend: N images, C channels, S = H W positions of an image, R = N S rows, T tokens of a caption, h heads, D their size.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stable_diffusion.residual import add_residual, maps_of, rows_of
from benchmarks.stable_diffusion.unet_architecture import Transformer, UNetArchitecture
from benchmarks.stable_diffusion.unet_operations import Operations
from common.nn.group_norm import GroupNorm, LayerNorm


class SelfAttention(nn.Module):
    """Weights of the self-attention; rows of ``to_qkv``: queries, keys, values."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.to_out = nn.ModuleDict({"0": nn.Linear(channels, channels)})


class CrossAttention(nn.Module):
    """Weights of the cross-attention; those of keys and values are in ``CaptionProjections``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_out = nn.ModuleDict({"0": nn.Linear(channels, channels)})


class GatedMlp(nn.Module):
    """Weights of the MLP with GEGLU and 4 C hidden features; rows of ``net.0.proj``: value, gate."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        up = nn.ModuleDict({"proj": nn.Linear(channels, 8 * channels)})
        self.net = nn.ModuleDict({"0": up, "2": nn.Linear(4 * channels, channels)})


class TransformerBlock(nn.Module):
    """Weights of self-attention, cross-attention and MLP, and of the norm before each."""

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__()
        self.attn1 = SelfAttention(channels)
        self.attn2 = CrossAttention(channels)
        self.ff = GatedMlp(channels)
        self.norm1, self.norm2, self.norm3 = (LayerNorm(channels, epsilon) for _ in range(3))


class SpatialTransformer(nn.Module):
    """Group norm, linear layer, one transformer block, linear layer, and the residual.

    Args:
        plan: channels and resolution.
        architecture: gives epsilons, groups and heads.
    """

    def __init__(self, plan: Transformer, architecture: UNetArchitecture, operations: Operations) -> None:
        super().__init__()
        channels = plan.channels
        self.norm = GroupNorm(channels, architecture.transformer_norm_groups, architecture.transformer_norm_epsilon)
        self.proj_in = nn.Linear(channels, channels)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(channels, architecture.norm_epsilon)])
        self.proj_out = nn.Linear(channels, channels)
        self._heads = channels // architecture.head_channels
        self._geglu, self._row_sums = operations.geglu, operations.row_sums
        places = (architecture.latent_size // plan.factor) ** 2
        self._self_attention = operations.attention[places]
        self._cross_attention = operations.cross_attention[places]

    def forward(self, x_NCHW: Tensor, keys_NTC: Tensor, values_NTC: Tensor) -> Tensor:
        """Map (N, C, H, W) in channels_last memory to the same shape.

        Args:
            keys_NTC, values_NTC: projected captions; may be views of wider rows.
        """
        normed_NCHW, (kept_NCHW,) = self.norm(x_NCHW, keep=True)
        block: Any = self.transformer_blocks[0]
        images, heads = x_NCHW.shape[0], self._heads

        h_RC = F.linear(rows_of(normed_NCHW), self.proj_in.weight)
        x_RC, normed_RC = block.norm1(h_RC, added=self.proj_in.bias)

        qkv_NS3hD = block.attn1.to_qkv(normed_RC).view(images, -1, 3, heads, x_RC.shape[1] // heads)
        h_RC = self._self_attention.packed(qkv_NS3hD).view_as(x_RC)
        out = block.attn1.to_out["0"]
        x_RC, normed_RC = block.norm2(F.linear(h_RC, out.weight), x_RC, added=out.bias)

        q_NShD = block.attn2.to_q(normed_RC).view(images, -1, heads, x_RC.shape[1] // heads)
        keys, values = (x_NTC.unflatten(2, (heads, -1)) for x_NTC in (keys_NTC, values_NTC))
        h_RC = self._cross_attention(q_NShD, keys, values).view_as(x_RC)
        out = block.attn2.to_out["0"]
        x_RC, normed_RC = block.norm3(F.linear(h_RC, out.weight), x_RC, added=out.bias)

        up, down = block.ff.net["0"]["proj"], block.ff.net["2"]
        gated = self._geglu(F.linear(normed_RC, up.weight), up.bias)
        x_RC = self._and_residual(down, gated, x_RC)
        return maps_of(self._and_residual(self.proj_out, x_RC, rows_of(kept_NCHW)), x_NCHW)

    def _and_residual(self, linear: nn.Linear, x_RC: Tensor, residual_RC: Tensor) -> Tensor:
        """Return a biased product plus its residual."""
        y_RC = F.linear(x_RC, linear.weight, linear.bias.detach())
        return add_residual(y_RC, linear.bias, residual_RC, self._row_sums)
