"""A pre-norm decoder out of parts: RMSNorm, rotary positions, grouped-query attention, SwiGLU; embedding and head.

Touvron et al., arXiv:2302.13971 and 2307.09288. Nothing has a bias; the rotation pairs dimension i of a head with i + D/2.
Query, key and value are one product, gate and up another. A block takes the sum of all blocks before it as a pair, the
residual stream and what the last sub-layer adds to it, since the addition belongs to the norm that reads the sum.

The modules here hold the weights and run anywhere through PyTorch's own operations and autograd. Frozen base weights
with adapters run faster and in a planned memory through :mod:`common.nn.frozen_decoder`, which reads the same modules.

Legend: B rows of a micro-batch, S their length, T = B * S tokens, E hidden, H query heads, K key/value heads, D head
size, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.ranges import AtLeast, Positive
from common.errors import ConfigError
from common.nn.lora import LoraSettings, Projection, TokenPlaces
from common.ops.triton_support import widen

SITES_PER_LAYER = 2
"""Adapters of layer i drop out at call sites 2i (QKV) and 2i + 1 (attention output)."""


@dataclass(frozen=True)
class DecoderArchitecture:
    """The shape of the network.

    Attributes:
        vocabulary: V.
        hidden: E.
        layers: blocks.
        heads: H.
        kv_heads: K, a divisor of H.
        head_size: D, even.
        feed_forward: F.
        norm_epsilon: inside the square root of every norm.
        rope_base: of the rotation's wavelengths.
        initializer_range: standard deviation of drawn weights.

    Raises:
        ConfigError: K does not divide H, or D is odd.
    """

    vocabulary: Annotated[int, AtLeast(1)]
    hidden: Annotated[int, AtLeast(1)]
    layers: Annotated[int, AtLeast(1)]
    heads: Annotated[int, AtLeast(1)]
    kv_heads: Annotated[int, AtLeast(1)]
    head_size: Annotated[int, AtLeast(2)]
    feed_forward: Annotated[int, AtLeast(1)]
    norm_epsilon: Annotated[float, Positive]
    rope_base: Annotated[float, Positive]
    initializer_range: Annotated[float, Positive]

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads={self.kv_heads}: a divisor of heads={self.heads}")
        if self.head_size % 2:
            raise ConfigError(f"head_size={self.head_size}: an even number, as the rotation pairs dimensions")

    @property
    def qkv_features(self) -> int:
        """(H + 2 K) D: rows of the fused product, query heads first, then key, then value heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def attention_features(self) -> int:
        """H D."""
        return self.heads * self.head_size

    @property
    def products_per_layer(self) -> int:
        """Weights of the matrix products of a block."""
        return self.hidden * (self.qkv_features + self.attention_features + 3 * self.feed_forward)

    @property
    def parameters(self) -> int:
        """All weights, without adapters."""
        per_layer = self.products_per_layer + 2 * self.hidden
        return self.layers * per_layer + 2 * self.vocabulary * self.hidden + self.hidden

    def forward_flops(self, length: int) -> float:
        """FLOPs (2 per multiply-add) of a row's forward pass, the causal half of the attention only."""
        products = 2.0 * (self.layers * self.products_per_layer + self.vocabulary * self.hidden) * length
        return products + self.attention_flops(length)

    def attention_flops(self, length: int) -> float:
        """Of these, scores and weighted sums of all layers."""
        return 2.0 * self.layers * length * length * self.attention_features


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q_BSHD, k_BSKD, v_BSKD) -> o_BSHD``, causal and differentiable; under context parallelism it sees to it that the
queries of this rank meet the keys of all."""


def causal_attention(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> Tensor:
    """Causal attention of whole rows through PyTorch; scores are divided by the root of D."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BSKD, v_BSKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + epsilon)`` (Zhang and Sennrich, arXiv:1910.07467), in fp32 at least."""

    def __init__(self, features: int, epsilon: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = widen(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (normed * widen(self.weight)).to(x.dtype)


def rotary_tables(positions_T: Tensor, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, fp32 (T, D / 2) (Su et al., arXiv:2104.09864)."""
    exponents = torch.arange(0, head_size, 2, device=positions_T.device, dtype=torch.float64) / head_size
    angles = positions_T.double().unsqueeze(1) * base**-exponents
    return angles.cos().float(), angles.sin().float()


def rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """``x`` with every pair (i, i + D/2) turned by its angle."""
    left, right = widen(x_THD).chunk(2, -1)
    cos, sin = (table.to(left.dtype).unsqueeze(1) for table in (cos_TD, sin_TD))
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x_THD.dtype)


class DecoderBlock(nn.Module):
    """Norm, attention, norm and MLP of one layer.

    Args:
        architecture: shapes.
        index: of the layer.
        device, dtype: of the weights, left uninitialised.
        lora: adapters of the attention's two products; None for none.
    """

    def __init__(
        self,
        architecture: DecoderArchitecture,
        index: int,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraSettings | None,
    ) -> None:
        super().__init__()
        shape = architecture
        self.architecture = shape
        site = SITES_PER_LAYER * index

        def product(rows: int, columns: int, lora: LoraSettings | None = None, site: int = 0) -> Projection:
            return Projection(columns, rows, device, dtype, lora, site)

        self.attention_norm = RMSNorm(shape.hidden, shape.norm_epsilon, device, dtype)
        self.qkv = product(shape.qkv_features, shape.hidden, lora, site)
        self.output = product(shape.hidden, shape.attention_features, lora, site + 1)
        self.mlp_norm = RMSNorm(shape.hidden, shape.norm_epsilon, device, dtype)
        self.gate_up = product(2 * shape.feed_forward, shape.hidden)
        self.down = product(shape.hidden, shape.feed_forward)

    def forward(
        self, residual_TE: Tensor, delta_TE: Tensor | None, places: TokenPlaces, attend: Attention
    ) -> tuple[Tensor, Tensor]:
        """The pair after this block, from the pair before it; the first block's delta is None."""
        residual_TE = residual_TE if delta_TE is None else residual_TE + delta_TE
        delta_TE = self.attention(self.attention_norm(residual_TE), places, attend)
        residual_TE = residual_TE + delta_TE
        return residual_TE, self.mlp(self.mlp_norm(residual_TE), places)

    def attention(self, x_TE: Tensor, places: TokenPlaces, attend: Attention) -> Tensor:
        """Map normalised hidden states to what the attention adds."""
        shape = self.architecture
        heads = self.qkv(x_TE, places).view(len(x_TE), -1, shape.head_size)
        q_THD, k_TKD, v_TKD = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        tables = rotary_tables(places.positions_T, shape.head_size, shape.rope_base)
        q_THD, k_TKD = rotated(q_THD, *tables), rotated(k_TKD, *tables)
        o_BSHD = attend(*(tensor.unflatten(0, (places.rows, -1)) for tensor in (q_THD, k_TKD, v_TKD)))
        result: Tensor = self.output(o_BSHD.reshape(len(x_TE), -1), places)
        return result

    def mlp(self, x_TE: Tensor, places: TokenPlaces) -> Tensor:
        """Map normalised hidden states to what the MLP adds: down(silu(gate) * up)."""
        gate_TF, up_TF = self.gate_up(x_TE, places).chunk(2, -1)
        result: Tensor = self.down((F.silu(widen(gate_TF)) * widen(up_TF)).to(x_TE.dtype), places)
        return result


class Decoder(nn.Module):
    """Embedding, blocks, the last norm, and the head's weight.

    Args:
        architecture: shapes.
        device, dtype: of the weights, left uninitialised; ``meta`` counts them only.
        lora: adapters of all blocks; everything else is then frozen.
    """

    def __init__(
        self,
        architecture: DecoderArchitecture,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        lora: LoraSettings | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.architecture = architecture
        shape = (architecture.vocabulary, architecture.hidden)
        self.embedding = nn.Embedding(*shape, _weight=torch.empty(shape, device=device, dtype=dtype))
        self.layers = nn.ModuleList(
            DecoderBlock(architecture, index, device, dtype, lora) for index in range(architecture.layers)
        )
        self.norm = RMSNorm(architecture.hidden, architecture.norm_epsilon, device, dtype)
        self.head = Projection(architecture.hidden, architecture.vocabulary, device, dtype)
        if lora is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".lora_" in name)

    @torch.no_grad()
    def initialise(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Draw all weights: normal, norms 1; adapters as :meth:`initialise_adapters`.

        Args:
            generator_of: the generator of a parameter's name, so that a weight is a function of seed and name.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif ".lora_" not in name:
                drawn = torch.empty(parameter.shape, device=parameter.device)
                drawn.normal_(0.0, self.architecture.initializer_range, generator=generator_of(name))
                parameter.copy_(drawn)
        self.initialise_adapters(generator_of)

    @torch.no_grad()
    def initialise_adapters(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """A uniform within 1 / sqrt(columns), which is Kaiming's with a = sqrt(5); B zero."""
        for name, parameter in self.named_parameters():
            if name.endswith(".lora_a"):
                bound = 1.0 / math.sqrt(parameter.shape[1])
                drawn = torch.empty(parameter.shape, device=parameter.device)
                parameter.copy_(drawn.uniform_(-bound, bound, generator=generator_of(name)))
            elif name.endswith(".lora_b"):
                parameter.zero_()

    def hidden_states(self, tokens_BS: Tensor, places: TokenPlaces, attend: Attention = causal_attention) -> Tensor:
        """Normalised hidden states (T, E) that the head reads."""
        residual_TE: Tensor = self.embedding(tokens_BS.flatten())
        delta_TE: Tensor | None = None
        for block in self.layers:
            residual_TE, delta_TE = block(residual_TE, delta_TE, places, attend)
        normed: Tensor = self.norm(residual_TE if delta_TE is None else residual_TE + delta_TE)
        return normed

    def forward_logits(self, tokens_BS: Tensor, places: TokenPlaces | None = None) -> Tensor:
        """Logits (B, S, V) of whole rows."""
        places = places or TokenPlaces.whole(*tokens_BS.shape, device=tokens_BS.device)
        logits: Tensor = self.head(self.hidden_states(tokens_BS, places), places)
        return logits.view(*tokens_BS.shape, -1)
