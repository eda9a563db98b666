"""Network of GPT-3, or the parts of it on one pipeline stage, with autograd.

Pre-norm blocks with biases, an MLP with tanh GELU, learned positions, and a head that shares the weight of the
embedding (Brown et al., arXiv:2005.14165; Radford et al. 2019). Norms multiply by 1 + weight. The rows of the QKV
weight are sorted by head: query, key and value of the first head, then of the second. Attention is dense in all layers.

The rows of the embedding are padded for the ranks that share them. Padding weights are zero, stay zero, and are
excluded from the softmax, so the loss does not depend on the number of ranks.

Legend: B rows of a micro-batch, S tokens per row, T = B * S tokens, s = T / ranks tokens of one rank of tp, E hidden,
H heads, h = H / ranks heads of one rank, D head size, F feed-forward width, N = 3 E / ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt3.architecture import Architecture
from common.distributed.tensor_parallel.cross_entropy import next_token_loss
from common.distributed.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    tensor_splits,
)
from common.distributed.tensor_parallel.ranks import AXIS, TensorParallel
from common.distributed.tensor_split import Split
from common.errors import ConfigError
from common.ops.triton_support import widen

EMBEDDING = "embedding.weight"
"""Name of the parameter that exists on both the first and the last stage."""

ONE_HEAD = 3
"""Number of parts per head in the QKV weight: query, key and value."""


class LayerNorm1p(nn.Module):
    """LayerNorm ``(x - mean) / sqrt(variance + epsilon) * (1 + weight) + bias``, computed at least in fp32.

    Attributes:
        partial_over: axes over which a gradient must be summed, as each rank of tp only normalises its own tokens.
    """

    partial_over: Mapping[str, tuple[str, ...]] = {"weight": (AXIS,), "bias": (AXIS,)}

    def __init__(self, features: int, epsilon: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype))

    def forward(self, x_sE: Tensor) -> Tensor:
        """Normalise the last dimension."""
        x, weight, bias = widen(x_sE), widen(self.weight), widen(self.bias)
        return F.layer_norm(x, (x.shape[-1],), 1.0 + weight, bias, self.epsilon).to(x_sE.dtype)


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

    def forward(self, rows: int, length: int) -> Tensor:
        """Return the position vectors (s, E) of this rank's tokens in ``rows`` rows."""
        return F.embedding(own_positions(rows, length, self._parallel, self.weight.device), self.weight)


def own_positions(rows: int, length: int, parallel: TensorParallel, device: torch.device) -> Tensor:
    """Return the positions (s,) of this rank's tokens in their rows."""
    return parallel.own_tokens(torch.arange(length, device=device).repeat(rows))


class Block(nn.Module):
    """Norm, attention, norm and MLP of one layer, with uninitialised weights.

    Raises:
        ConfigError: the number of ranks does not divide the heads or the feed-forward units.
    """

    def __init__(
        self, architecture: Architecture, parallel: TensorParallel, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        shape, self.architecture, ranks = architecture, architecture, parallel.size
        for what, count in (("heads", shape.heads), ("feed-forward units", shape.feed_forward)):
            if count % ranks:
                raise ConfigError(f"layout.tp={ranks} does not divide the {count} {what}: choose a tp that does")

        def norm() -> LayerNorm1p:
            return LayerNorm1p(shape.hidden, shape.norm_epsilon, device, dtype)

        def column(outputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(shape.hidden, (outputs,), parallel, bias=True, device=device, dtype=dtype)

        def row(inputs: int) -> RowParallelLinear:
            return RowParallelLinear(inputs, shape.hidden, parallel, bias=True, device=device, dtype=dtype)

        self.attention_norm, self.qkv, self.output = norm(), column(ONE_HEAD * shape.hidden), row(shape.hidden)
        self.mlp_norm, self.up, self.down = norm(), column(shape.feed_forward), row(shape.feed_forward)

    def forward(self, x_sE: Tensor, rows: int) -> Tensor:
        """Return the hidden states after this block."""
        x_sE = x_sE + self.attention(self.attention_norm(x_sE), rows)
        return x_sE + self.mlp(self.mlp_norm(x_sE))

    def attention(self, x_sE: Tensor, rows: int) -> Tensor:
        """Map normalised hidden states to the output of the attention, which is added to the residual stream."""
        qkv_TN = self.qkv(x_sE)
        split_BSh3D = qkv_TN.view(rows, len(qkv_TN) // rows, -1, ONE_HEAD, self.architecture.head_size)
        q, k, v = (part.transpose(1, 2) for part in split_BSh3D.unbind(3))
        o_BhSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.output(o_BhSD.transpose(1, 2).reshape(len(qkv_TN), -1))
        return result

    def mlp(self, x_sE: Tensor) -> Tensor:
        """Map normalised hidden states to the output of the MLP, which is added to the residual stream."""
        up_TF = self.up(x_sE)
        result: Tensor = self.down(F.gelu(widen(up_TF), approximate="tanh").to(up_TF.dtype))
        return result


class Gpt(nn.Module):
    """Parts of the network on one stage, with uninitialised weights; without a pipeline, the whole network.

    Names of parameters are those in the whole network.

    Args:
        parts: layers of each part, in the order of the pipeline's chunks.
        first: whether this stage has the embedding and positions.
        last: whether this stage has the last norm and the head, which uses the embedding.
        device: device of the weights; ``meta`` allocates no memory.
        parallel: ranks that share every layer; None for a single rank.

    Raises:
        ConfigError: ``tp`` does not divide heads or feed-forward units.
    """

    def __init__(
        self,
        architecture: Architecture,
        parts: Sequence[range],
        first: bool = True,
        last: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        device, parallel = torch.device(device), parallel or TensorParallel()
        self.architecture, self.parts, self.parallel = architecture, tuple(parts), parallel
        self.first, self.last = first, last
        shape = architecture
        if first or last:
            padded = shape.padded_vocabulary(parallel.size)
            self.embedding = VocabularyParallelEmbedding(
                padded, shape.hidden, parallel, device=device, dtype=dtype, kept=shape.vocabulary
            )
        if first:
            self.positions = Positions(shape.positions, shape.hidden, parallel, device, dtype)
        self.layers = nn.ModuleDict(
            {str(number): Block(shape, parallel, device, dtype) for part in self.parts for number in part}
        )
        if last:
            self.norm = LayerNorm1p(shape.hidden, shape.norm_epsilon, device, dtype)

    def blocks(self, chunk: int) -> list[Block]:
        """Return the blocks of one part, in order."""
        found = [self.layers[str(number)] for number in self.parts[chunk]]
        return [block for block in found if isinstance(block, Block)]

    def chunk_module(self, chunk: int) -> nn.Module:
        """Return a module with exactly the parameters of one part.

        The first part also has the embedding and positions, the last part the last norm and the embedding.
        """
        ends: list[nn.Module] = []
        if self.first and chunk == 0:
            ends += [self.embedding, self.positions]
        if self.last and chunk == len(self.parts) - 1:
            ends += [self.norm, self.embedding]
        return nn.ModuleList([*ends, *self.blocks(chunk)])

    def tensor_splits(self) -> dict[str, Split]:
        """Return how ranks split the shared parameters of this stage, by name, with the padding of the embedding."""
        return tensor_splits(self)

    @torch.no_grad()
    def initialise(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Draw all weights; set norms, biases and padding to zero. The values do not depend on the layout.

        Args:
            generator_of: returns the random generator for the name of a parameter.
        """
        splits, std = self.tensor_splits(), self.architecture.initializer_range
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.zero_()
                continue
            split = splits.get(name)
            drawn = parameter.new_empty(parameter.shape if split is None else split.kept_shape)
            drawn.normal_(0.0, std, generator=generator_of(name))
            parameter.copy_(drawn if split is None else split.local_of(split.padded(drawn)))

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Return the hidden states (s, E) of this rank before the first layer, given all tokens. Collective over tp."""
        rows, length = tokens_BS.shape
        words_sE: Tensor = self.embedding(tokens_BS.flatten())
        return words_sE + self.positions(rows, length)

    def through(self, chunk: int, x_sE: Tensor, rows: int) -> Tensor:
        """Return the hidden states of this rank after one part of the network. Collective over tp.

        Args:
            chunk: index of the part on this stage.
        """
        for block in self.blocks(chunk):
            x_sE = block(x_sE, rows)
        return x_sE

    def losses(self, x_sE: Tensor, labels_T: Tensor, head_chunk: int) -> Tensor:
        """Return the cross-entropy (T,) of every token in nats, equal on all ranks of tp. Collective over tp.

        Args:
            x_sE: hidden states after the last layer.
            labels_T: next token of each token; -1 where not scored, which gives loss 0.
            head_chunk: number of tokens whose logits exist at the same time.
        """
        vocabulary = self.architecture.vocabulary
        return next_token_loss(
            self.norm(x_sE), self.embedding.weight, labels_T, self.parallel, head_chunk, vocabulary=vocabulary
        )

    def summed_loss(self, x_sE: Tensor, labels_T: Tensor, head_chunk: int, factor: float = 1.0) -> Tensor:
        """Return ``factor`` times the sum of :meth:`losses`, for training."""
        return self.losses(x_sE, labels_T, head_chunk).sum() * factor
