"""Pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, embedding and head.

Touvron et al., arXiv:2302.13971 and 2307.09288. There are no biases. The rotation pairs dimension i of a head with i
+ D/2. One matrix product computes query, key and value, another one gate and up. A block receives the residual stream
and the result of the last sub-layer as a pair, because the next norm adds them.

These modules hold the weights and run on every device with PyTorch's operations and autograd.
:mod:`common.nn.frozen_decoder` (frozen weights with adapters) and :mod:`common.nn.trained_decoder` run the same
modules faster.

Legend: B rows of a micro-batch, S length of a row, T = B * S tokens, s = T / ranks tokens of one tp rank, E hidden, H
query heads, K key/value heads, D head size, F feed-forward width, V vocabulary, v = V / ranks words of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.ranges import AtLeast, Positive
from common.distributed.context_parallel.split import ContextSplit, attention
from common.distributed.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    tensor_splits,
)
from common.distributed.tensor_parallel.ranks import AXIS, TensorParallel, gate_up_parts, qkv_parts
from common.distributed.tensor_split import Split
from common.errors import ConfigError
from common.nn.lora import LoraSettings, TokenPlaces, adapter_dropout
from common.ops import rope
from common.ops.triton_support import widen

SITES_PER_LAYER = 2
"""Dropout call sites per layer: the adapters of layer i use 2i (QKV) and 2i + 1 (attention output)."""


@dataclass(frozen=True)
class DecoderArchitecture:
    """Sizes and constants of a decoder.

    Attributes:
        vocabulary: V.
        hidden: E.
        heads: H.
        kv_heads: K, a divisor of H.
        head_size: D, an even number.
        feed_forward: F.
        norm_epsilon: added to the mean square in every norm.
        rope_base: base of the rotation's wavelengths.
        initializer_range: standard deviation of initial weights.

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
        """(H + 2 K) D: rows of the QKV weight: query heads, then key heads, then value heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def attention_features(self) -> int:
        """H D: features of the attention's result."""
        return self.heads * self.head_size

    @property
    def products_per_layer(self) -> int:
        """Number of weights in the matrix products of one block."""
        return self.hidden * (self.qkv_features + self.attention_features + 3 * self.feed_forward)

    @property
    def parameters(self) -> int:
        """Number of all weights, without adapters."""
        per_layer = self.products_per_layer + 2 * self.hidden
        return self.layers * per_layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def rope_scaling(self) -> rope.RopeScaling | None:
        """Scaling of the rotation frequencies. None means no scaling; subclasses may override this."""
        return None

    def rope_tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotation, each of shape (T, D / 2)."""
        return rope.tables(positions_T, self.head_size, self.rope_base, self.rope_scaling)

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of the initial values of a matrix, given its name in the network."""
        return self.initializer_range

    def forward_flops(self, length: int) -> float:
        """Return the FLOPs (2 per multiply-add) of a row's forward pass, with only the causal half of the attention."""
        products = 2.0 * (self.layers * self.products_per_layer + self.vocabulary * self.hidden) * length
        return products + self.attention_flops(length)

    def attention_flops(self, length: int) -> float:
        """Return the part of :meth:`forward_flops` for scores and weighted sums of all layers."""
        return 2.0 * self.layers * length * length * self.attention_features


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal, differentiable attention: ``(q_BSHD, k_BSKD, v_BSKD) -> o_BSHD``.

Under context parallelism, it lets the queries of this rank attend to the keys of all ranks.
"""


def causal_attention(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> Tensor:
    """Return the causal attention of whole rows, through PyTorch. Scores are divided by sqrt(D)."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BSKD, v_BSKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def split_attention(split: ContextSplit) -> Attention:
    """Return :func:`causal_attention` for rows that are split over the ranks of ``split``."""
    if split.ranks == 1:
        return causal_attention

    def chunk(q_BnHD: Tensor, k_BmKD: Tensor, v_BmKD: Tensor) -> Tensor:
        queries, keys = q_BnHD.shape[1], k_BmKD.shape[1]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q_BnHD.device).tril(keys - queries)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BnHD, k_BmKD, v_BmKD))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return lambda q, k, v: attention(q, k, v, split, chunk)


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + epsilon)`` (Zhang and Sennrich, arXiv:1910.07467), computed in fp32 or fp64.

    Attributes:
        partial_over: parameters whose gradients must be summed over mesh axes. Each tp rank normalises only its own
            tokens and has only their part of the weight's gradient.
    """

    partial_over: Mapping[str, tuple[str, ...]] = {"weight": (AXIS,)}

    def __init__(self, features: int, epsilon: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = widen(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (normed * widen(self.weight)).to(x.dtype)


def rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Return ``x`` with every pair of dimensions (i, i + D/2) rotated by its angle."""
    left, right = widen(x_THD).chunk(2, -1)
    cos, sin = (table.to(left.dtype).unsqueeze(1) for table in (cos_TD, sin_TD))
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x_THD.dtype)


class _Placement(TypedDict):
    device: torch.device
    dtype: torch.dtype


class DecoderBlock(nn.Module):
    """One layer: norm, attention, norm and MLP.

    Args:
        index: number of the layer, from 0.
        device, dtype: device and dtype of the weights, which stay uninitialised.
        lora: settings of the adapters on the QKV and output products; None for no adapters.
        parallel: ranks that share the layer.
    """

    def __init__(
        self,
        architecture: DecoderArchitecture,
        index: int,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraSettings | None,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        shape, self.architecture, self.lora, self.index = architecture, architecture, lora, index
        given: _Placement = {"device": device, "dtype": dtype}
        qkv = qkv_parts(shape.heads, shape.kv_heads, shape.head_size, parallel)
        gate_up = gate_up_parts(shape.feed_forward, parallel)
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_epsilon, **given)
        self.qkv = ColumnParallelLinear(shape.hidden, qkv, parallel, adapter=lora, **given)
        self.output = RowParallelLinear(shape.attention_features, shape.hidden, parallel, adapter=lora, **given)
        self.mlp_norm = RMSNorm(shape.hidden, shape.norm_epsilon, **given)
        self.gate_up = ColumnParallelLinear(shape.hidden, gate_up, parallel, **given)
        self.down = RowParallelLinear(shape.feed_forward, shape.hidden, parallel, **given)

    def site(self, product: str) -> int:
        """Return the dropout call site of the product ``qkv`` or ``output``."""
        return SITES_PER_LAYER * self.index + ("qkv", "output").index(product)

    def forward(
        self, residual_sE: Tensor, delta_sE: Tensor | None, places: TokenPlaces, attend: Attention
    ) -> tuple[Tensor, Tensor]:
        """Return the (residual, delta) pair after this block. ``delta_sE`` is None for the first block."""
        residual_sE = residual_sE if delta_sE is None else residual_sE + delta_sE
        delta_sE = self.attention(self.attention_norm(residual_sE), places, attend)
        residual_sE = residual_sE + delta_sE
        return residual_sE, self.mlp(self.mlp_norm(residual_sE))

    def attention(self, x_sE: Tensor, places: TokenPlaces, attend: Attention) -> Tensor:
        """Map normalised hidden states of this rank's tokens to the attention's addition to the residual stream."""
        shape = self.architecture
        drop = {name: adapter_dropout(self.lora, self.site(name), places) for name in ("qkv", "output")}
        qkv_TN = self.qkv(x_sE, drop["qkv"], places.numbers)
        ranks = shape.qkv_features // qkv_TN.shape[1]
        sizes = [shape.heads // ranks, shape.kv_heads // ranks, shape.kv_heads // ranks]
        q_THD, k_TKD, v_TKD = qkv_TN.unflatten(1, (-1, shape.head_size)).split(sizes, 1)
        tables = shape.rope_tables(places.positions)
        q_THD, k_TKD = rotated(q_THD, *tables), rotated(k_TKD, *tables)
        o_BSHD = attend(*(tensor.unflatten(0, (places.rows, -1)) for tensor in (q_THD, k_TKD, v_TKD)))
        result: Tensor = self.output(o_BSHD.reshape(len(q_THD), -1), drop["output"], places.numbers)
        return result

    def mlp(self, x_sE: Tensor) -> Tensor:
        """Map normalised hidden states to the MLP's addition to the residual stream: down(silu(gate) * up)."""
        gate_TF, up_TF = self.gate_up(x_sE).chunk(2, -1)
        result: Tensor = self.down((F.silu(widen(gate_TF)) * widen(up_TF)).to(x_sE.dtype))
        return result


class Decoder(nn.Module):
    """Embedding, blocks, last norm and head.

    Args:
        device, dtype: device and dtype of the weights, which stay uninitialised. ``meta`` allocates nothing.
        lora: settings of the adapters in all blocks; all other parameters are then frozen.
        parallel: ranks that share every layer; None for this rank alone.
    """

    def __init__(
        self,
        architecture: DecoderArchitecture,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        lora: LoraSettings | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        device, parallel = torch.device(device), parallel or TensorParallel()
        self.architecture, self.parallel = architecture, parallel
        vocabulary, hidden = architecture.vocabulary, architecture.hidden
        self.embedding = VocabularyParallelEmbedding(vocabulary, hidden, parallel, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderBlock(architecture, index, device, dtype, lora, parallel) for index in range(architecture.layers)
        )
        self.norm = RMSNorm(hidden, architecture.norm_epsilon, device, dtype)
        self.head = ColumnParallelLinear(hidden, (vocabulary,), parallel, device=device, dtype=dtype)
        if lora is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".lora_" in name)

    @property
    def blocks(self) -> list[DecoderBlock]:
        """All blocks in order."""
        return [block for block in self.layers if isinstance(block, DecoderBlock)]

    def tensor_splits(self) -> dict[str, Split]:
        """Return how each parameter that is split over the ranks is split, by name."""
        return tensor_splits(self)

    def initialise(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Initialise all weights: the base as in :meth:`drawn_base`, the adapters as in :meth:`initialise_adapters`."""
        own, splits = dict(self.named_parameters()), self.tensor_splits()
        with torch.no_grad():
            for name, value in self.drawn_base(generator_of):
                own[name].copy_(splits[name].local_of(value) if name in splits else value)
        self.initialise_adapters(generator_of)

    @torch.no_grad()
    def drawn_base(
        self,
        generator_of: Callable[[str], torch.Generator],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and random initial value of every weight except adapters. Norm weights are 1.

        Each value is the whole weight, equal on all ranks.

        Args:
            generator_of: returns the generator for a parameter's name, so that a value depends only on seed and name.
            device, dtype: device and dtype of the values; None for those of the parameter.
        """
        splits, std_of = self.tensor_splits(), self.architecture.initial_std
        for name, parameter in list(self.named_parameters()):  # a copy: the caller may replace parameters
            if ".lora_" in name:
                continue
            shape = splits[name].full_shape if name in splits else parameter.shape
            drawn = torch.empty(shape, device=device or parameter.device, dtype=dtype or parameter.dtype)
            if drawn.ndim == 1:
                yield name, drawn.fill_(1.0)
            else:
                yield name, drawn.normal_(0.0, std_of(name), generator=generator_of(name))

    @torch.no_grad()
    def initialise_adapters(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Draw A uniformly within 1 / sqrt(columns), which is Kaiming's rule with a = sqrt(5), and set B to zero."""
        splits = self.tensor_splits()
        for name, parameter in self.named_parameters():
            if name.endswith(".lora_a"):
                split = splits.get(name)
                drawn = torch.empty(parameter.shape if split is None else split.full_shape, device=parameter.device)
                drawn.uniform_(-1.0, 1.0, generator=generator_of(name)).mul_(drawn.shape[1] ** -0.5)
                parameter.copy_(drawn if split is None else split.local_of(drawn))
            elif name.endswith(".lora_b"):
                parameter.zero_()

    def hidden_states(self, tokens_BS: Tensor, places: TokenPlaces, attend: Attention = causal_attention) -> Tensor:
        """Return the normalised hidden states (s, E) of this rank's tokens, the input of the head."""
        residual_sE: Tensor = self.embedding(tokens_BS.flatten())
        delta_sE: Tensor | None = None
        for block in self.blocks:
            residual_sE, delta_sE = block(residual_sE, delta_sE, places, attend)
        normed: Tensor = self.norm(residual_sE if delta_sE is None else residual_sE + delta_sE)
        return normed

    def forward_logits(self, tokens_BS: Tensor, places: TokenPlaces | None = None) -> Tensor:
        """Return the logits (B, S, v) of whole rows for this rank's part of the vocabulary."""
        rows, length = tokens_BS.shape
        places = places or TokenPlaces.whole(rows, length, device=tokens_BS.device)
        logits: Tensor = self.head(self.hidden_states(tokens_BS, places))
        return logits.view(rows, length, -1)
