"""Decoder, or the parts of it on one pipeline stage: modules that hold the weights and run under autograd.

Pre-norm blocks of attention and MLP between an embedding and a head. :class:`common.language.architecture.Architecture`
chooses norm, activation, positions, biases and head. :mod:`common.language.decoder` runs the same modules faster, with
hand-written backward passes.

With a padded vocabulary, padding weights are zero, stay zero, and are excluded from the softmax, so that the loss does
not depend on the number of ranks. Legend: as in :mod:`common.language.architecture`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.distributed.context_parallel import ContextSplit, attention
from common.distributed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, tensor_splits
from common.distributed.tensor_parallel.ranks import AXIS, TensorParallel, gate_up_parts, qkv_parts
from common.distributed.tensor_parallel.vocabulary import VocabularyParallelEmbedding, next_token_loss
from common.distributed.tensor_split import TensorSplit
from common.errors import ConfigError
from common.language.architecture import Architecture, DecoderNorm, TokenPositions
from common.language.lora import LoraSettings, adapter_dropout
from common.ops.triton_support import widen

SITES_PER_LAYER = 2
"""Dropout call sites per layer: the adapters of layer i use 2i (QKV) and 2i + 1 (attention output)."""

EMBEDDING = "embedding.weight"
"""Name of the parameter that exists on both the first and the last stage if the head shares it."""

QKV = 3
"""Number of parts per head in a QKV weight that is sorted by head: query, key and value."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal, differentiable attention: ``(q_BSHD, k_BSKD, v_BSKD) -> o_BSHD``.

Under context parallelism, it lets the queries of this rank attend to the keys of all ranks.
"""


def _scaled_attention(q_BnHD: Tensor, k_BmKD: Tensor, v_BmKD: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BnHD, k_BmKD, v_BmKD))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return o.transpose(1, 2)


def causal_attention(split: ContextSplit | None) -> Attention:
    """Return PyTorch's attention for rows that are split over ranks, or for whole rows. Scores are over sqrt(D)."""
    if split is None or split.ranks == 1:
        return _scaled_attention

    def chunk(q_BnHD: Tensor, k_BmKD: Tensor, v_BmKD: Tensor) -> Tensor:
        queries, keys = q_BnHD.shape[1], k_BmKD.shape[1]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q_BnHD.device).tril(keys - queries)
        return _scaled_attention(q_BnHD, k_BmKD, v_BmKD, mask)

    return lambda q, k, v: attention(q, k, v, split, chunk)


def rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Return ``x`` with every pair of dimensions (i, i + D/2) rotated by its angle."""
    left, right = widen(x_THD).chunk(2, -1)
    cos, sin = (table.to(left.dtype).unsqueeze(1) for table in (cos_TD, sin_TD))
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x_THD.dtype)


class Positions(nn.Module):
    """Learned vectors of the positions in a row.

    Attributes:
        partial_over: axes over which a gradient must be summed, as each rank of tp only has some positions.
    """

    partial_over: Mapping[str, tuple[str, ...]] = {"weight": (AXIS,)}

    def __init__(
        self, positions: int, hidden: int, parallel: TensorParallel, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._parallel = parallel
        self.weight = nn.Parameter(torch.empty(positions, hidden, device=device, dtype=dtype))

    def forward(self, positions: TokenPositions) -> Tensor:
        """Return the position vectors (s, E) of this rank's tokens."""
        return F.embedding(self._parallel.own_tokens(positions.in_row), self.weight)


class _Placement(TypedDict):
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class Building:
    """What the modules of a block are built from.

    Attributes:
        lora: settings of the adapters on the QKV and output products; None for no adapters.
        parallel: ranks that share every layer.
        device, dtype: device and dtype of the weights, which stay uninitialised.
    """

    architecture: Architecture
    lora: LoraSettings | None
    parallel: TensorParallel
    device: torch.device
    dtype: torch.dtype

    def norm(self) -> DecoderNorm:
        """Return a norm of the hidden states."""
        shape = self.architecture
        return shape.norm.module(shape.hidden, shape.norm_epsilon, self.device, self.dtype)

    def column(self, parts: Sequence[int], lora: LoraSettings | None = None) -> ColumnParallelLinear:
        """Return a column-parallel layer that reads hidden states."""
        shape, given = self.architecture, self._given()
        return ColumnParallelLinear(shape.hidden, parts, self.parallel, adapter=lora, bias=shape.biases, **given)

    def row(self, inputs: int, lora: LoraSettings | None = None) -> RowParallelLinear:
        """Return a row-parallel layer that returns hidden states."""
        shape, given = self.architecture, self._given()
        return RowParallelLinear(inputs, shape.hidden, self.parallel, adapter=lora, bias=shape.biases, **given)

    def _given(self) -> _Placement:
        return {"device": self.device, "dtype": self.dtype}


class DecoderBlock(nn.Module):
    """One layer: norm, attention, norm and MLP.

    Args:
        index: number of the layer, from 0.

    Raises:
        ConfigError: the number of ranks does not divide the heads or the feed-forward units.
    """

    def __init__(self, build: Building, index: int) -> None:
        super().__init__()
        shape, self.architecture, self.lora, self.index = build.architecture, build.architecture, build.lora, index
        parallel, activation = build.parallel, shape.activation
        for what, count in (("heads", shape.heads), ("feed-forward units", shape.feed_forward)):
            if count % parallel.size:
                raise ConfigError(
                    f"layout.tp={parallel.size} does not divide the {count} {what}: choose a tp that does"
                )
        qkv: tuple[int, ...] = (shape.qkv_features,)
        if shape.rotary:
            qkv = qkv_parts(shape.heads, shape.kv_heads, shape.head_size, parallel)
        self.attention_norm = build.norm()
        self.qkv = build.column(qkv, build.lora)
        self.output = build.row(shape.attention_features, build.lora)
        self.mlp_norm = build.norm()
        if shape.mlp is not None:
            self.mlp: nn.Module = shape.mlp(build)
            return
        features = shape.feed_forward
        self.add_module(
            activation.first, build.column(gate_up_parts(features, parallel) if activation.parts == 2 else (features,))
        )
        self.down = build.row(features)

    @property
    def first(self) -> ColumnParallelLinear:
        """First layer of the MLP: gate and up, or up."""
        return cast(ColumnParallelLinear, self.get_submodule(self.architecture.activation.first))

    def site(self, product: str) -> int:
        """Return the dropout call site of the product ``qkv`` or ``output``."""
        return SITES_PER_LAYER * self.index + ("qkv", "output").index(product)

    def forward(self, x_sE: Tensor, positions: TokenPositions, attend: Attention) -> Tensor:
        """Return the hidden states (s, E) of this rank after this block."""
        x_sE = x_sE + self.attention(self.attention_norm(x_sE), positions, attend)
        return x_sE + self.feed_forward(self.mlp_norm(x_sE))

    def attention(self, x_sE: Tensor, positions: TokenPositions, attend: Attention) -> Tensor:
        """Return what attention adds to the residual stream, (s, E), given this rank's normalised hidden states."""
        shape = self.architecture
        drop = {name: adapter_dropout(self.lora, self.site(name), positions) for name in ("qkv", "output")}
        qkv_TN = self.qkv(x_sE, drop["qkv"], positions.in_batch)
        q, k, v = self._rotated(qkv_TN, positions) if shape.rotary else by_head(qkv_TN, shape.head_size)
        o_BSHD = attend(*(tensor.unflatten(0, (positions.rows, -1)) for tensor in (q, k, v)))
        result: Tensor = self.output(o_BSHD.reshape(len(qkv_TN), -1), drop["output"], positions.in_batch)
        return result

    def _rotated(self, qkv_TN: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.architecture
        ranks = shape.qkv_features // qkv_TN.shape[1]
        sizes = [shape.heads // ranks, shape.kv_heads // ranks, shape.kv_heads // ranks]
        q_THD, k_TKD, v_TKD = qkv_TN.unflatten(1, (-1, shape.head_size)).split(sizes, 1)
        cos_TD, sin_TD = shape.rope_tables(positions.in_row)
        assert cos_TD is not None
        assert sin_TD is not None
        return rotated(q_THD, cos_TD, sin_TD), rotated(k_TKD, cos_TD, sin_TD), v_TKD

    def feed_forward(self, x_sE: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream, (s, E), given this rank's normalised hidden states."""
        result: Tensor
        if self.architecture.mlp is not None:
            result = self.mlp(x_sE)
        else:
            result = self.down(self.architecture.activation.function(widen(self.first(x_sE))).to(x_sE.dtype))
        return result


def by_head(qkv_TN: Tensor, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (T, h, D) of query, key and value of a product that is sorted by head, or of their gradients."""
    q, k, v = qkv_TN.view(len(qkv_TN), -1, QKV, head_size).unbind(2)
    return q, k, v


class Decoder(nn.Module):
    """Embedding, blocks, last norm and head; or the parts of them on one pipeline stage, named as in the whole network.

    Args:
        device, dtype: device and dtype of the weights, which stay uninitialised. ``meta`` allocates nothing.
        lora: settings of the adapters in all blocks; all other parameters are then frozen.
        parallel: ranks that share every layer; None for this rank alone.
        parts: layers of each part, in the order of the pipeline's chunks; None for one part with all layers.
        first: whether this stage has the embedding and positions.
        last: whether this stage has the last norm and the head.
        split: how rows are split over the ranks of cp; None for whole rows.

    Raises:
        ConfigError: ``tp`` does not divide heads, feed-forward units or vocabulary.
    """

    def __init__(
        self,
        architecture: Architecture,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        lora: LoraSettings | None = None,
        parallel: TensorParallel | None = None,
        *,
        parts: Sequence[range] | None = None,
        first: bool = True,
        last: bool = True,
        split: ContextSplit | None = None,
    ) -> None:
        super().__init__()
        device, parallel = torch.device(device), parallel or TensorParallel()
        self.architecture, self.parallel, self.first, self.last, self.dtype = architecture, parallel, first, last, dtype
        self.parts = (range(architecture.layers),) if parts is None else tuple(parts)
        self._attend = causal_attention(split)
        shape, build = architecture, Building(architecture, lora, parallel, device, dtype)
        padded = shape.padded_vocabulary(parallel.size)
        if first or (last and shape.tied_head):
            kept = None if shape.words_per_rank == 1 else shape.vocabulary
            self.embedding = VocabularyParallelEmbedding(
                padded, shape.hidden, parallel, device=device, dtype=dtype, kept=kept
            )
        if first and not shape.rotary:
            self.positions = Positions(shape.positions, shape.hidden, parallel, device, dtype)
        numbers = [number for part in self.parts for number in part]
        self.layers = nn.ModuleDict({str(number): DecoderBlock(build, number) for number in numbers})
        if last:
            self.norm = build.norm()
            if not shape.tied_head:
                self.head = ColumnParallelLinear(shape.hidden, (padded,), parallel, device=device, dtype=dtype)
        if lora is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".lora_" in name)

    def blocks(self, part: int = 0) -> list[DecoderBlock]:
        """Return the blocks of one part, in order."""
        found = [self.layers[str(number)] for number in self.parts[part]]
        return [block for block in found if isinstance(block, DecoderBlock)]

    def chunk_module(self, part: int) -> nn.Module:
        """Return a module with exactly the parameters of one part.

        The first part also has the embedding and positions, the last part the last norm and the head.
        """
        ends: list[str] = []
        if self.first and part == 0:
            ends += ["embedding", "positions"]
        if self.last and part == len(self.parts) - 1:
            ends += ["norm", "embedding" if self.architecture.tied_head else "head"]
        own = dict(self.named_children())
        return nn.ModuleList([*(own[name] for name in ends if name in own), *self.blocks(part)])

    @property
    def head_weight(self) -> nn.Parameter:
        """The weight (v, E) of the head.

        Raises:
            ValueError: this stage has no head.
        """
        if not self.last:
            raise ValueError("a stage that is not the last has no head")
        return self.embedding.weight if self.architecture.tied_head else self.head.weight

    def tensor_splits(self) -> dict[str, TensorSplit]:
        """Return how each parameter that is split over the ranks is split, by name, with the padding of the words."""
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
        """Yield name and random initial value of every weight except adapters. Biases and padding are 0.

        Each value is the whole weight, equal on all ranks and for every layout.

        Args:
            generator_of: returns the generator for a parameter's name, so that a value depends only on seed and name.
            device, dtype: device and dtype of the values; None for those of the parameter.
        """
        splits, shape = self.tensor_splits(), self.architecture
        for name, parameter in list(self.named_parameters()):  # a copy: the caller may replace parameters
            if ".lora_" in name:
                continue
            split = splits.get(name)
            size = parameter.shape if split is None else split.kept_shape
            drawn = torch.empty(size, device=device or parameter.device, dtype=dtype or parameter.dtype)
            if drawn.ndim == 1:
                drawn.fill_(0.0 if name.endswith("bias") else shape.norm.module.initial)
            else:
                drawn.normal_(0.0, shape.initial_std(name), generator=generator_of(name))
            yield name, drawn if split is None else split.padded(drawn)

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

    def embed(self, tokens_BS: Tensor, positions: TokenPositions) -> Tensor:
        """Return the hidden states (s, E) of this rank before the first layer, given all tokens. Collective over tp."""
        words_sE: Tensor = self.embedding(tokens_BS.flatten())
        return words_sE if self.architecture.rotary else words_sE + self.positions(positions)

    def through(self, part: int, x_sE: Tensor, positions: TokenPositions) -> Tensor:
        """Return the hidden states (s, E) of this rank after one part of the network. Collective over tp and cp."""
        for block in self.blocks(part):
            x_sE = block(x_sE, positions, self._attend)
        return x_sE

    def normed(self, x_sE: Tensor) -> Tensor:
        """Return the input (s, E) of the head, given the hidden states after the last layer."""
        result: Tensor = self.norm(x_sE)
        return result

    def hidden_states(self, tokens_BS: Tensor, positions: TokenPositions) -> Tensor:
        """Return the input (s, E) of the head for this rank's tokens, if this stage has the whole network."""
        return self.normed(self.through(0, self.embed(tokens_BS, positions), positions))

    def losses(self, hidden_sE: Tensor, labels_T: Tensor, head_chunk: int) -> Tensor:
        """Return the cross-entropy (T,) of every token in nats, equal on all ranks of tp. Collective over tp.

        Args:
            hidden_sE: input of the head.
            labels_T: next token of each token; -1 where not scored, which gives loss 0.
            head_chunk: number of tokens whose logits exist at the same time.
        """
        shape = self.architecture
        kept = None if shape.words_per_rank == 1 else shape.vocabulary
        return next_token_loss(hidden_sE, self.head_weight, labels_T, self.parallel, head_chunk, vocabulary=kept)

    def forward_logits(self, tokens_BS: Tensor, positions: TokenPositions | None = None) -> Tensor:
        """Return the logits (B, S, v) of whole rows for this rank's part of the vocabulary, from an untied head."""
        rows, length = tokens_BS.shape
        positions = positions or TokenPositions.whole(rows, length, device=tokens_BS.device)
        logits: Tensor = self.head(self.hidden_states(tokens_BS, positions))
        return logits.view(rows, length, -1)
