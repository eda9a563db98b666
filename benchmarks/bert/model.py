"""BERT with both pretraining heads and its loss, over a flat buffer of tokens.

Devlin et al., arXiv:1810.04805: a post-norm transformer encoder with learned positions, tanh GELU, and dropout on the
embeddings, the attention probabilities and the output of both sub-layers. ``starts`` and ``lengths`` give the position
of each sequence in one buffer of fixed capacity. Tokens outside all sequences cost time but have no effect, and their
gradient is zero.

With FP8 matrix products, the operation before a product writes its result in FP8 (with the product's
``input_scaling``), and the operation after it writes its input gradient in FP8 (with the product's ``handover``).
Without FP8, both are None.

Sub-layers pass hidden states on as a pair, one for the next matrix product and one for the residual connection. Both
have the same values in the same memory but separate gradients; the operation that returned the pair adds them.

Legend: T tokens, S sequences, M masked tokens (all three are capacities), E hidden, H heads, D head dimension,
F feed-forward, V rows of the word table: the vocabulary, padded to a multiple of ``VOCABULARY_MULTIPLE``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.ranges import AtLeast, Positive, ProbabilityBelowOne
from common.errors import ConfigError
from common.ops.attention import ATTENTION
from common.ops.bias_gelu import BIAS_GELU
from common.ops.cross_entropy import CROSS_ENTROPY
from common.ops.dropout import DROPOUT
from common.ops.dropout.reference import DropoutMask
from common.ops.dropout_add_norm import DROPOUT_ADD_NORM
from common.ops.fp8_cast.reference import Fp8Tensor, Scaling
from common.ops.linear import LINEAR, Linear
from common.ops.operation import Operation, OperationRequest, choose
from common.ops.triton_support import widen
from common.step.train_step import Losses

OPERATIONS: dict[str, Operation] = {
    "attention": ATTENTION,
    "dropout": DROPOUT,
    "dropout_add_norm": DROPOUT_ADD_NORM,
    "bias_gelu": BIAS_GELU,
    "cross_entropy": CROSS_ENTROPY,
    "linear": LINEAR,
}
"""Operations that ``model.implementations`` can configure.

``linear`` only applies to the layers of the encoder; the heads always use PyTorch's matrix product.
"""

VOCABULARY_MULTIPLE = 64
"""Zero rows pad the word table to a multiple of this number, to align the matrix product of the decoder."""

EMBEDDING_SITE = 0
SITES_PER_LAYER = 3
"""Dropout of the embeddings is call site 0; layer i has 3i + 1 (probabilities), 3i + 2 (attention), 3i + 3 (MLP)."""


@dataclass(frozen=True)
class BertArchitecture:
    """Sizes and constants of the network.

    Attributes:
        hidden: E, a multiple of ``heads``.
        heads: H.
        feed_forward: F.
        max_sequence_length: number of learned positions.
        segment_types: number of segment types (sentence A, sentence B).
        norm_epsilon: constant inside the square root of every LayerNorm.
        dropout: probability of every dropout except that of the attention probabilities.
        initializer_range: standard deviation of the initial weights, truncated at two standard deviations.

    Raises:
        ConfigError: ``hidden`` is not a multiple of ``heads``.
    """

    vocabulary: Annotated[int, AtLeast(1)]
    hidden: int
    layers: Annotated[int, AtLeast(1)]
    heads: Annotated[int, AtLeast(1)]
    feed_forward: Annotated[int, AtLeast(1)]
    max_sequence_length: Annotated[int, AtLeast(1)]
    segment_types: Annotated[int, AtLeast(1)]
    norm_epsilon: Annotated[float, Positive]
    dropout: Annotated[float, ProbabilityBelowOne]
    attention_dropout: Annotated[float, ProbabilityBelowOne]
    initializer_range: Annotated[float, Positive]

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.hidden % self.heads:
            raise ConfigError(f"hidden={self.hidden}: a positive multiple of heads={self.heads}")

    @property
    def head_dim(self) -> int:
        """D, the size of one head."""
        return self.hidden // self.heads

    @property
    def padded_vocabulary(self) -> int:
        """V, the rows of the word table."""
        return -(-self.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def training_flops(self, lengths: Iterable[int], masked_tokens: int) -> float:
        """Return the model FLOPs (2 per multiply-add) of training: the forward pass, and twice as many backward.

        Args:
            lengths: tokens of each sequence.
            masked_tokens: total number over all sequences.
        """
        E, sizes = self.hidden, list(lengths)
        encoder = self.layers * (4 * E * E + 2 * E * self.feed_forward) * sum(sizes)
        probabilities = self.layers * 2 * E * sum(length * length for length in sizes)
        heads = (E * E + E * self.vocabulary) * masked_tokens + (E * E + 2 * E) * len(sizes)
        return 6.0 * (encoder + probabilities + heads)


@dataclass(frozen=True)
class _Operations:
    """Functions of the chosen implementations; :mod:`common.ops` has their signatures."""

    attention: Callable[..., Tensor]
    dropout: Callable[..., Tensor]
    dropout_add_norm: Callable[..., Any]
    bias_gelu: Callable[..., Any]
    cross_entropy: Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _EncoderBuild:
    """Options and factories that all modules of the network share."""

    architecture: BertArchitecture
    operations: _Operations
    linear: str
    device: torch.device
    dtype: torch.dtype

    def encoder_linear(self, in_features: int, out_features: int) -> Linear:
        layer = self.head_linear(in_features, out_features)
        layer.choose(self.linear)
        return layer

    def head_linear(self, in_features: int, out_features: int) -> Linear:
        return Linear(in_features, out_features, self.device, self.dtype)

    def norm(self) -> nn.LayerNorm:
        """Return a LayerNorm that only stores weight, bias and epsilon for the fused operations."""
        epsilon = self.architecture.norm_epsilon
        return nn.LayerNorm(self.architecture.hidden, epsilon, device=self.device, dtype=self.dtype)

    def table(self, rows: int) -> nn.Embedding:
        weight = torch.empty(rows, self.architecture.hidden, device=self.device, dtype=self.dtype)
        return nn.Embedding.from_pretrained(weight, freeze=False)


class BertEmbeddings(nn.Module):
    """Sum of word, position and segment embeddings, then LayerNorm and dropout."""

    def __init__(self, build: _EncoderBuild) -> None:
        super().__init__()
        architecture = build.architecture
        self.word = build.table(architecture.padded_vocabulary)
        self.position = build.table(architecture.max_sequence_length)
        self.segment = build.table(architecture.segment_types)
        self.norm = build.norm()
        self._p = architecture.dropout
        self._operations = build.operations

    def forward(self, input_ids_T: Tensor, position_ids_T: Tensor, segment_ids_T: Tensor, seed: Tensor) -> Tensor:
        """Map ids to (T, E)."""
        position, segment, norm = self.position.weight, self.segment.weight, self.norm
        # A table of all position + segment sums has few rows. Adding per token would read and write (T, E) again.
        place_table = (position.unsqueeze(1) + segment).flatten(0, 1)
        place_TE = F.embedding(position_ids_T * len(segment) + segment_ids_T, place_table)
        x_TE: Tensor = self._operations.dropout_add_norm(
            self.word(input_ids_T),
            None,
            place_TE,
            norm.weight,
            norm.bias,
            norm.eps,
            DropoutMask(0.0, seed, EMBEDDING_SITE),
        )
        return self._operations.dropout(x_TE, self._p if self.training else 0.0, seed, EMBEDDING_SITE)


class BertAttention(nn.Module):
    """Self-attention, output projection, dropout, residual and norm.

    The rows of ``qkv.weight`` are the queries of all heads, then the keys, then the values.
    """

    def __init__(self, build: _EncoderBuild, layer: int) -> None:
        super().__init__()
        architecture = build.architecture
        E = architecture.hidden
        self.qkv = build.encoder_linear(E, 3 * E)
        self.output = build.encoder_linear(E, E)
        self.norm = build.norm()
        self._architecture = architecture
        self._operations = build.operations
        self._site = EMBEDDING_SITE + SITES_PER_LAYER * layer + 1

    def forward(
        self,
        x_TE: Tensor | Fp8Tensor,
        residual_TE: Tensor,
        starts_S: Tensor,
        lengths_S: Tensor,
        seed: Tensor,
        fp8: Scaling | None,
    ) -> tuple[Tensor | Fp8Tensor, Tensor]:
        """Return the output (T, E) twice, the first in FP8 if ``fp8``; the inputs are such a pair."""
        architecture, operations, norm = self._architecture, self._operations, self.norm
        p_attention = architecture.attention_dropout if self.training else 0.0
        p = architecture.dropout if self.training else 0.0
        qkv = self.qkv.handover()
        qkv_TN = self.qkv(x_TE, bias_gradient=False, handover=qkv)
        context_THD = operations.attention(
            qkv_TN.view(-1, 3, architecture.heads, architecture.head_dim),
            starts_S,
            lengths_S,
            architecture.max_sequence_length,
            DropoutMask(p_attention, seed, self._site),
            self.qkv.bias,
            handover=qkv,
        )
        y_TE, output = self.output.without_bias(context_THD.flatten(1))
        pair: tuple[Tensor | Fp8Tensor, Tensor] = operations.dropout_add_norm(
            y_TE,
            self.output.bias,
            residual_TE,
            norm.weight,
            norm.bias,
            norm.eps,
            DropoutMask(p, seed, self._site + 1),
            twice=True,
            fp8=fp8,
            handover=output,
        )
        return pair


class Mlp(nn.Module):
    """Two linear layers around GELU, dropout, residual and norm."""

    def __init__(self, build: _EncoderBuild, layer: int) -> None:
        super().__init__()
        E, width = build.architecture.hidden, build.architecture.feed_forward
        self.up = build.encoder_linear(E, width)
        self.down = build.encoder_linear(width, E)
        self.norm = build.norm()
        self._p = build.architecture.dropout
        self._operations = build.operations
        self._site = EMBEDDING_SITE + SITES_PER_LAYER * layer + 3

    def forward(
        self, x_TE: Tensor | Fp8Tensor, residual_TE: Tensor, seed: Tensor, fp8: Scaling | None
    ) -> tuple[Tensor | Fp8Tensor, Tensor]:
        """Return the output (T, E) twice, the first in FP8 if ``fp8``; the inputs are such a pair."""
        p, norm = self._p if self.training else 0.0, self.norm
        up_TF, up = self.up.without_bias(x_TE)
        h_TF = self._operations.bias_gelu(up_TF, self.up.bias, fp8=self.down.input_scaling(), handover=up)
        y_TE, down = self.down.without_bias(h_TF)
        pair: tuple[Tensor | Fp8Tensor, Tensor] = self._operations.dropout_add_norm(
            y_TE,
            self.down.bias,
            residual_TE,
            norm.weight,
            norm.bias,
            norm.eps,
            DropoutMask(p, seed, self._site),
            twice=True,
            fp8=fp8,
            handover=down,
        )
        return pair


class EncoderLayer(nn.Module):
    """One layer of the encoder."""

    def __init__(self, build: _EncoderBuild, layer: int) -> None:
        super().__init__()
        self.attention = BertAttention(build, layer)
        self.mlp = Mlp(build, layer)

    def forward(
        self,
        x_TE: Tensor | Fp8Tensor,
        residual_TE: Tensor,
        starts_S: Tensor,
        lengths_S: Tensor,
        seed: Tensor,
        fp8: Scaling | None,
    ) -> tuple[Tensor | Fp8Tensor, Tensor]:
        """Return the output (T, E) twice, the first in FP8 if ``fp8``; the inputs are such a pair."""
        pair = self.attention(x_TE, residual_TE, starts_S, lengths_S, seed, self.mlp.up.input_scaling())
        return self.mlp(*pair, seed, fp8)


class MaskedLm(nn.Module):
    """Masked-language-model head: a linear layer, GELU, norm, and the word table as decoder."""

    def __init__(self, build: _EncoderBuild) -> None:
        super().__init__()
        architecture = build.architecture
        self.transform = build.head_linear(architecture.hidden, architecture.hidden)
        self.norm = build.norm()
        self.bias = nn.Parameter(torch.empty(architecture.padded_vocabulary, device=build.device, dtype=build.dtype))
        self._operations = build.operations

    def forward(self, hidden_ME: Tensor, word_table_VE: Tensor, seed: Tensor) -> Tensor:
        """Map (M, E) to logits (M, V); without gradients, 16-bit models return fp32 logits."""
        norm = self.norm
        h_ME = self._operations.bias_gelu(self.transform(hidden_ME, add_bias=False), self.transform.bias)
        h_ME = self._operations.dropout_add_norm(
            h_ME, None, None, norm.weight, norm.bias, norm.eps, DropoutMask(0.0, seed, EMBEDDING_SITE)
        )
        if torch.is_grad_enabled():
            return F.linear(h_ME, word_table_VE, self.bias)
        return _wide_logits(h_ME, word_table_VE, self.bias)


def _wide_logits(hidden_ME: Tensor, word_table_VE: Tensor, bias_V: Tensor) -> Tensor:
    """Return logits of which 16-bit types are widened to fp32.

    Evaluation looks for the largest logit. In bf16, values above 8 are 1/16 apart, so that several words often share
    the largest logit, and the choice among them would be arbitrary.
    """
    if hidden_ME.is_cuda and hidden_ME.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(hidden_ME, word_table_VE.t(), out_dtype=torch.float32).add_(bias_V)
    return F.linear(widen(hidden_ME), widen(word_table_VE), widen(bias_V))


@dataclass(frozen=True)
class HeadOutputs:
    """Results of the two heads for one micro-batch.

    Attributes:
        masked_lm_losses: (M,) fp32, or fp64 if the model is fp64; 0 where not ``masked``.
        correct: (M,) bool, whether the predicted word is the label; False where not ``masked``.
        masked: (M,) bool, which entries have a label.
        next_sentence_losses: (S,) same dtype as ``masked_lm_losses``; 0 where not ``present``.
        present: (S,) bool, which sequences have a label.
    """

    masked_lm_losses: Tensor
    correct: Tensor
    masked: Tensor
    next_sentence_losses: Tensor
    present: Tensor


class Bert(nn.Module):
    """Encoder, masked-language-model head and next-sentence head.

    Args:
        generator: random generator of the initial weights, which are drawn in fp32 on its device; None leaves the
            weights uninitialised, for models that load a checkpoint or are only measured.
        implementations: implementation of each operation, by the operation's name; None means ``auto`` for all.

    Attributes:
        chosen: name of the chosen implementation of each operation.

    Raises:
        UnsupportedImplementation: an implementation of ``implementations`` does not support device, dtype or sizes.
    """

    def __init__(
        self,
        architecture: BertArchitecture,
        generator: torch.Generator | None,
        implementations: Mapping[str, str] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        sizes = {"head_dim": architecture.head_dim, "columns": architecture.hidden}
        chosen = choose(implementations or {}, OPERATIONS, OperationRequest(device, dtype, sizes))
        self.chosen = {name: choice.name for name, choice in chosen.items()}
        operations = _Operations(**{name: choice.function for name, choice in chosen.items() if name != "linear"})
        build = _EncoderBuild(architecture, operations, self.chosen["linear"], device, dtype)
        self.architecture = architecture
        self.embeddings = BertEmbeddings(build)
        self.layers = nn.ModuleList(EncoderLayer(build, index) for index in range(architecture.layers))
        self.masked_lm = MaskedLm(build)
        self.pooler = build.head_linear(architecture.hidden, architecture.hidden)
        self.next_sentence = build.head_linear(architecture.hidden, 2)
        self._cross_entropy = operations.cross_entropy
        if generator is not None:
            self._initialise(generator)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Draw weights from a normal distribution, truncated at two standard deviations.

        Weights of norms become 1; all biases and the padding of the word table become 0.
        """
        std, vocabulary = self.architecture.initializer_range, self.architecture.vocabulary
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(float(name.endswith("norm.weight")))
                continue
            rows = vocabulary if parameter is self.embeddings.word.weight else parameter.shape[0]
            drawn = torch.empty(rows, parameter.shape[1], device=generator.device)
            nn.init.trunc_normal_(drawn, 0.0, std, -2 * std, 2 * std, generator=generator)
            parameter[:rows].copy_(drawn)
            parameter[rows:].zero_()

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Names and modules in the order of the forward pass.

        Each block only uses its own parameters, but ``masked_lm`` also uses the word table of ``embeddings``.
        """
        layers = [(f"layers.{index}", layer) for index, layer in enumerate(self.layers)]
        heads = [(name, self.get_submodule(name)) for name in ("masked_lm", "pooler", "next_sentence")]
        return [("embeddings", self.embeddings), *layers, *heads]

    def forward(self, tensors: Mapping[str, Tensor]) -> HeadOutputs:
        """Return losses and correct answers of one micro-batch.

        Args:
            tensors: the tensors of :mod:`benchmarks.bert.collate`, int32 or int64: input_ids, segment_ids,
                position_ids (T,); starts, lengths, next_sentence_labels (S,); masked_positions, masked_labels (M,);
                dropout_seed, a 0-d int64, which is only used in training.
        """
        seed, starts_S, lengths_S = tensors["dropout_seed"], tensors["starts"], tensors["lengths"]
        x_TE = self.embeddings(tensors["input_ids"], tensors["position_ids"], tensors["segment_ids"], seed)
        residual_TE = x_TE
        layers: list[Any] = list(self.layers)
        scalings = [layer.attention.qkv.input_scaling() for layer in layers[1:]] + [None]
        for layer, fp8 in zip(layers, scalings, strict=True):
            x_TE, residual_TE = layer(x_TE, residual_TE, starts_S, lengths_S, seed, fp8)

        masked_labels_M = tensors["masked_labels"]
        # One gather for both heads: its backward pass writes one (T, E) gradient instead of two that must be added.
        wanted = torch.cat([tensors["masked_positions"], starts_S])
        hidden_ME, first_SE = x_TE.index_select(0, wanted).split([len(masked_labels_M), len(starts_S)])
        logits_MV = self.masked_lm(hidden_ME, self.embeddings.word.weight, seed)
        masked_lm_losses_M, correct_M = self._cross_entropy(
            logits_MV, masked_labels_M, self.architecture.vocabulary, inplace=True
        )

        sentence_labels_S = tensors["next_sentence_labels"]
        pooled_SE = torch.tanh(self.pooler(first_SE))
        next_sentence_losses_S = F.cross_entropy(
            widen(self.next_sentence(pooled_SE)), sentence_labels_S.long(), ignore_index=-1, reduction="none"
        )
        return HeadOutputs(
            masked_lm_losses_M,
            correct_M,
            masked_labels_M >= 0,
            next_sentence_losses_S,
            sentence_labels_S >= 0,
        )


def pretraining_loss(heads: HeadOutputs) -> Losses:
    """Return the mean loss of the masked tokens plus the mean next-sentence loss.

    As in the MLPerf reference implementation, the first denominator is the number of masked tokens + 1e-5, so that a
    micro-batch without masked tokens has loss 0. Metrics: ``masked_lm_loss`` and ``next_sentence_loss``, detached.
    """
    dtype = heads.masked_lm_losses.dtype
    masked_lm = heads.masked_lm_losses.sum() / (heads.masked.sum().to(dtype) + 1e-5)
    next_sentence = heads.next_sentence_losses.sum() / heads.present.sum().clamp(min=1).to(dtype)
    metrics = {"masked_lm_loss": masked_lm.detach(), "next_sentence_loss": next_sentence.detach()}
    return Losses(masked_lm + next_sentence, metrics)
