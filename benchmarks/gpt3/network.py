"""GPT-3's network, or the parts of it that a pipeline stage has, under autograd.

Pre-norm blocks with biases, a tanh-GELU of four times the width, learned positions, and the embedding as the head
(Brown et al., arXiv:2005.14165; Radford et al. 2019). Norms multiply with 1 + weight. Rows of the QKV weight go by
head: query, key and value of the first, then of the second. Attention is dense in all layers.

The rows of the embedding are padded for the ranks that share them. Padding has weights of zero and no part in the
softmax, so that the loss is the same for any number of ranks, and its weights stay zero.

Legend: B rows of a micro-batch, S their length, T = B * S tokens, s = T / ranks those of one rank of tp, E hidden,
H heads and h = H / ranks those of one rank, D head size, F feed-forward width, N = 3 E / ranks.
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
"""The parameter that first and last stage both have."""

ONE_HEAD = 3
"""Query, key and value, one after the other in the rows of a head."""


class LayerNorm1p(nn.Module):
    """``(x - mean) / sqrt(variance + epsilon) * (1 + weight) + bias``, in fp32 at least.

    Attributes:
        partial_over: each rank of tp normalises its own tokens, of which it has the gradients.
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
    """Learned vectors of the positions of a row.

    Attributes:
        partial_over: each rank of tp adds them to its own tokens.
    """

    partial_over: Mapping[str, tuple[str, ...]] = {"weight": (AXIS,)}

    def __init__(
        self, positions: int, hidden: int, parallel: TensorParallel, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._parallel = parallel
        self.weight = nn.Parameter(torch.empty(positions, hidden, device=device, dtype=dtype))

    def forward(self, rows: int, length: int) -> Tensor:
        """Vectors (s, E) of this rank's own tokens of so many rows."""
        return F.embedding(own_positions(rows, length, self._parallel, self.weight.device), self.weight)


def own_positions(rows: int, length: int, parallel: TensorParallel, device: torch.device) -> Tensor:
    """Positions (s,) of this rank's own tokens in their rows."""
    return parallel.own_tokens(torch.arange(length, device=device).repeat(rows))


class Block(nn.Module):
    """Norm, attention, norm and MLP of one layer.

    Args:
        architecture: shapes.
        parallel: the ranks that share the layer.
        device, dtype: of the weights, left uninitialised.

    Raises:
        ConfigError: a rank would have a part of a head or of a unit.
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
        """Hidden states after this block."""
        x_sE = x_sE + self.attention(self.attention_norm(x_sE), rows)
        return x_sE + self.mlp(self.mlp_norm(x_sE))

    def attention(self, x_sE: Tensor, rows: int) -> Tensor:
        """Map normalised hidden states of own tokens to what the attention adds to them."""
        qkv_TN = self.qkv(x_sE)
        split_BSh3D = qkv_TN.view(rows, len(qkv_TN) // rows, -1, ONE_HEAD, self.architecture.head_size)
        q, k, v = (part.transpose(1, 2) for part in split_BSh3D.unbind(3))
        o_BhSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.output(o_BhSD.transpose(1, 2).reshape(len(qkv_TN), -1))
        return result

    def mlp(self, x_sE: Tensor) -> Tensor:
        """Map normalised hidden states to what the MLP adds."""
        up_TF = self.up(x_sE)
        result: Tensor = self.down(F.gelu(widen(up_TF), approximate="tanh").to(up_TF.dtype))
        return result


class Gpt(nn.Module):
    """The parts of the network that one stage has; without a pipeline that is all of it.

    Names of parameters are those of the whole network.

    Args:
        architecture: shapes.
        parts: layers of each part, in the order of the pipeline's chunks.
        first: the embedding comes before the first part.
        last: the last norm and the head, which is the embedding, come behind the last part.
        device, dtype: of the weights, left uninitialised; ``meta`` counts them only.
        parallel: the ranks that share every layer; None for this one alone.

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
        """Those of one part, in their order."""
        found = [self.layers[str(number)] for number in self.parts[chunk]]
        return [block for block in found if isinstance(block, Block)]

    def chunk_module(self, chunk: int) -> nn.Module:
        """What has the parameters of one part, and no others: embedding and positions with the first part of the first
        stage, the last norm and the embedding with the last part of the last stage."""
        ends: list[nn.Module] = []
        if self.first and chunk == 0:
            ends += [self.embedding, self.positions]
        if self.last and chunk == len(self.parts) - 1:
            ends += [self.norm, self.embedding]
        return nn.ModuleList([*ends, *self.blocks(chunk)])

    def tensor_splits(self) -> dict[str, Split]:
        """How the ranks share each parameter of this stage that they share, by name; the embedding's padding too."""
        return tensor_splits(self)

    @torch.no_grad()
    def initialise(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Draw all weights, each a function of seed and name, equal at every layout; norms, biases and padding zero.

        Args:
            generator_of: the generator of a parameter's name.
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
        """Hidden states (s, E) of own tokens before the first layer, given all tokens. Collective over tp."""
        rows, length = tokens_BS.shape
        words_sE: Tensor = self.embedding(tokens_BS.flatten())
        return words_sE + self.positions(rows, length)

    def through(self, chunk: int, x_sE: Tensor, rows: int) -> Tensor:
        """Hidden states of own tokens behind one part of the network. Collective over tp.

        Args:
            chunk: the part, of this stage.
            x_sE: hidden states before it.
            rows: B.
        """
        for block in self.blocks(chunk):
            x_sE = block(x_sE, rows)
        return x_sE

    def losses(self, x_sE: Tensor, labels_T: Tensor, head_chunk: int) -> Tensor:
        """The cross-entropy of every token in nats (T,), equal on all ranks of tp. Collective over tp.

        Args:
            x_sE: hidden states behind the last layer.
            labels_T: the next token of each; -1 where none is scored, whose loss is 0.
            head_chunk: tokens whose logits are there at a time.
        """
        vocabulary = self.architecture.vocabulary
        return next_token_loss(
            self.norm(x_sE), self.embedding.weight, labels_T, self.parallel, head_chunk, vocabulary=vocabulary
        )

    def summed_loss(self, x_sE: Tensor, labels_T: Tensor, head_chunk: int, factor: float = 1.0) -> Tensor:
        """``factor`` times the sum of :meth:`losses`, as training wants it."""
        return self.losses(x_sE, labels_T, head_chunk).sum() * factor
