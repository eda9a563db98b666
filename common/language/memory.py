"""Estimated GPU memory of a decoder, before anything is allocated."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from common.distributed.pipeline.order import most_in_flight, order, slots_of_chunks
from common.distributed.tensor_parallel.overlap import SLOTS
from common.language.architecture import Architecture
from common.optim.memory_plan import KEPT, STATE, TRANSPOSED, PlannedMemory, TrainedWeights, reserved

ADAPTER_BYTES = 16
"""Bytes per adapter weight in training: bf16 weight and gradient, fp32 master and two moments."""


@dataclass(frozen=True, kw_only=True)
class Workspace(PlannedMemory):
    """Sizes that determine the memory of one rank.

    Attributes:
        tokens: T of the micro-batch, or this cp rank's part of it; 0 if the rank only evaluates.
        ranks: number of tp ranks, which split every layer and the tokens of the residual stream.
        sharers: number of cp ranks. Each keeps the keys and values of whole rows.
        eval_tokens: tokens of an evaluation batch on this rank; 0 if other ranks evaluate.
        itemsize: bytes of an element of weights and activations.
        fp8: whether products are in FP8, and the MLP's first product is kept in FP8.
        head_chunk: number of tokens whose logits exist at the same time.
        alone: whether there are no other ranks and no communicators.
    """

    architecture: Architecture
    tokens: int
    ranks: int = 1
    sharers: int = 1
    eval_tokens: int
    itemsize: int
    fp8: bool
    head_chunk: int
    alone: bool

    @abstractmethod
    def layer(self) -> int:
        """Return the bytes that one layer keeps for the backward pass if it recomputes nothing."""

    @abstractmethod
    def recomputable(self) -> int:
        """Return the bytes of :meth:`layer` that recomputation saves."""

    def transposed(self) -> int:
        """Return the bytes of one layer's transposed weights; 0 for products in 16 bits, which need none."""
        return self.architecture.products_per_layer // self.ranks if self.fp8 else 0

    @property
    def layers(self) -> int:
        """Number of layers that keep anything."""
        return self.architecture.layers if self.tokens else 0

    def kept(self, recomputed: int) -> int:
        """Return the bytes that all layers keep for the backward pass if ``recomputed`` of them recompute."""
        return self.layers * self.layer() - recomputed * self.recomputable()

    def qkv(self) -> int:
        """Return the bytes of one layer's query, key and value."""
        shape = self.architecture
        keys_and_values = (shape.qkv_features - shape.attention_features) * self.sharers
        return self.tokens * (shape.attention_features + keys_and_values) * self.itemsize // self.ranks

    def attended(self) -> int:
        """Return the bytes per token of both residuals, the norms' moments, the attention's result and its lse."""
        shape = self.architecture
        stream = 2 * shape.hidden * self.itemsize + 2 * 4
        return stream + shape.attention_features * self.itemsize + 4 * shape.heads

    def first_features(self) -> int:
        """Return the features of the MLP's first product, over all tp ranks."""
        return self.architecture.activation.parts * self.architecture.feed_forward

    def reserved(self) -> int:
        """Return the bytes outside PyTorch's allocator, plus the buffers that move tokens between ranks."""
        slot = max(self.tokens, self.eval_tokens) * self.architecture.hidden * self.itemsize
        return reserved(self.alone) + (SLOTS * slot if self.ranks > 1 else 0)


@dataclass(frozen=True, kw_only=True)
class FrozenWorkspace(Workspace):
    """Sizes for frozen weights with adapters.

    Attributes:
        cast_apart: whether separate passes cast to FP8, so that the 16-bit values exist beside the FP8 values.
    """

    rank: int
    cast_apart: bool = False
    recomputes: ClassVar[str] = "query, key and value"

    @property
    def remedies(self) -> str:  # type: ignore[override]
        """Options that save memory."""
        if not self.tokens:
            return "model.linear=fp8, a smaller reader.eval_rows, more ranks of evaluation.layout.tp"
        return (
            "model.recomputed_qkv=auto, model.transposed_layers=auto, model.linear=fp8, a smaller micro_batch, more "
            "ranks of layout.cp or layout.tp"
        )

    def parts(self, recomputed: int, transposed: int) -> dict[str, float]:
        """Return the bytes by category.

        Args:
            recomputed: number of layers that recompute activations.
            transposed: number of layers that keep their weights transposed.
        """
        return {
            "frozen weights": self.frozen(),
            "adapters": self.adapters(),
            KEPT: self.kept(recomputed),
            TRANSPOSED: transposed * self.transposed(),
            "scratch": self.scratch(),
            "transients": self.transient(),
            "evaluation": self.evaluation(),
            "reserved": self.reserved(),
        }

    def frozen(self) -> int:
        """Return the bytes of the frozen weights."""
        shape = self.architecture
        products = shape.layers * shape.products_per_layer
        rest = (shape.parameters - products) * self.itemsize
        return (products * (1 if self.fp8 else self.itemsize) + rest) // self.ranks

    def adapters(self) -> int:
        """Return the bytes of the adapters, with gradients and optimizer state if the rank trains."""
        shape = self.architecture
        whole, split = 2 * shape.hidden, shape.qkv_features + shape.attention_features
        each = ADAPTER_BYTES if self.tokens else self.itemsize
        return shape.layers * self.rank * (whole + split // self.ranks) * each

    def recomputable(self) -> int:
        """Return the bytes of one layer's query, key and value."""
        return self.qkv()

    def layer(self) -> int:
        """Return the bytes that one layer keeps for the backward pass."""
        mlp = self.first_features() * (1 if self.fp8 else self.itemsize)
        split = self.tokens * (self.attended() + mlp) // self.ranks
        return self.qkv() + split + self.tokens * 2 * self.rank * self.itemsize

    def scratch(self) -> int:
        """Return the bytes of the buffers that all layers share: an MLP product, and in FP8 a transposed weight."""
        shape, features = self.architecture, self.first_features()
        tokens = max(self.tokens, self.eval_tokens) if self.fp8 else self.tokens
        mlp = features * tokens * self.itemsize
        return (mlp + features * shape.hidden) // self.ranks if self.fp8 else mlp // (2 * self.ranks)

    def transient(self) -> int:
        """Return the peak bytes of training's temporaries, either in an MLP's backward pass or in the head."""
        if not self.tokens:
            return 0
        shape, ranks = self.architecture, self.ranks
        hidden = self.tokens * shape.hidden * self.itemsize
        first = self.tokens * self.first_features() * self._computed(self.itemsize) // ranks
        head = self.head_chunk * shape.vocabulary * (4 + 2 * self.itemsize) // ranks
        return 5 * hidden + max(first, head)

    def evaluation(self) -> int:
        """Return the bytes of an evaluation's forward pass, whose CUDA graph has its own memory."""
        shape, ranks = self.architecture, self.ranks
        features = 4 * shape.hidden + (2 * shape.qkv_features + shape.attention_features) // ranks
        act = shape.feed_forward * self._computed(3 * self.itemsize) // ranks
        head = self.head_chunk * shape.vocabulary * (4 + 2 * self.itemsize) // ranks
        return self.eval_tokens * (features * self.itemsize + act) + (head if self.eval_tokens else 0)

    def _computed(self, half: int) -> int:
        """Return the bytes of a value that the next product reads; ``half`` for products in 16 bits."""
        return half if not self.fp8 else 1 + self.itemsize * self.cast_apart


@dataclass(frozen=True, kw_only=True)
class TrainedWorkspace(Workspace, TrainedWeights):
    """Sizes for trained weights.

    Attributes:
        chunk_graphs: whether forward and backward passes have separate CUDA graphs, each with its own memory.
    """

    chunk_graphs: bool = False
    recomputes: ClassVar[str] = "gate and up"
    remedies: ClassVar[str] = (
        "optimizer.masters=remainder, optimizer.gradients=same, optimizer.shard=all on several ranks, "
        "model.recomputed_gate_up=auto, a smaller micro_batch or model.head_chunk, more ranks of layout.cp or layout.tp"
    )

    def parts(self, recomputed: int, transposed: int) -> dict[str, float]:
        """Return the bytes by category.

        Args:
            recomputed: number of layers that recompute activations.
            transposed: number of layers that keep their weights transposed.
        """
        return {
            STATE: self.state(self.parameters(), bool(self.tokens)),
            "weights in FP8": self.weights_in_fp8(transposed),
            KEPT: self.kept(recomputed),
            "scratch": self.scratch(recomputed > 0),
            "transients": self.transient(),
            "evaluation": self.evaluation(),
            "reserved": self.reserved(),
        }

    def parameters(self) -> int:
        """Return the number of weights of this rank. Norms are replicated, all other weights are split over tp."""
        norms = (2 * self.architecture.layers + 1) * self.architecture.norm_parameters
        return (self.architecture.parameters - norms) // self.ranks + norms

    def weights_in_fp8(self, transposed: int = 0) -> int:
        """Return the bytes of the weights cast to FP8, once per step or evaluation, and of the kept transposes."""
        layers = self.architecture.layers
        return (layers + min(transposed, layers)) * self.transposed()

    def recomputable(self) -> int:
        """Return the bytes that a layer's MLP keeps."""
        features, act = self.first_features(), self.architecture.feed_forward
        return self.tokens * (features + act if self.fp8 else features * self.itemsize) // self.ranks

    def layer(self) -> int:
        """Return the bytes that one layer keeps for the backward pass."""
        normed = 2 * self.architecture.hidden if self.fp8 else 0
        return self.qkv() + self.tokens * (self.attended() + normed) // self.ranks + self.recomputable()

    def scratch(self, recomputes: bool) -> int:
        """Return the bytes of the buffers that all layers share. ``recomputes``: a layer recomputes gate and up."""
        hidden, features = self.architecture.hidden, self.first_features() // self.ranks
        passing = max(self.tokens if self.fp8 or recomputes else 0, self.eval_tokens)
        weight = features * hidden
        widest = max(features, hidden) + max(self.architecture.feed_forward // self.ranks, hidden)
        kept_transposed = (weight + self.tokens * widest + weight * self.gradient_bytes) if self.fp8 else 0
        return passing * features * self.itemsize + (kept_transposed if self.tokens else 0)

    def transient(self) -> int:
        """Return the peak bytes of training's temporaries, either in an MLP's backward pass or in the head."""
        if not self.tokens:
            return 0
        return (2 if self.chunk_graphs else 1) * self._transient_of_a_pass()

    def _transient_of_a_pass(self) -> int:
        shape, ranks = self.architecture, self.ranks
        hidden = self.tokens * shape.hidden * self.itemsize
        features = self.tokens * shape.feed_forward // ranks
        mlp = features * (self.itemsize + 2) if self.fp8 else 4 * features * self.itemsize
        words = shape.vocabulary // ranks
        if ranks == 1:
            head = self.head_chunk * words * self.itemsize + words * shape.hidden * self.gradient_bytes
            return 5 * hidden + max(mlp, head)
        # 2 * hidden: one gathered tensor of all tokens and one before the scatter. Logits also exist in fp32. The
        # head's gradient is fp32 until all chunks are added, beside the main gradient if that is not fp32.
        logits = self.head_chunk * words * (4 + self.itemsize)
        summed = words * shape.hidden * (4 + (self.gradient_bytes if self.gradient_bytes < 4 else 0))
        return 5 * hidden // ranks + 2 * hidden + max(mlp, logits + summed)

    def evaluation(self) -> int:
        """Return the bytes of an evaluation's forward pass, whose CUDA graph has its own memory."""
        shape, ranks = self.architecture, self.ranks
        features = (2 * shape.qkv_features + shape.attention_features + shape.feed_forward) // ranks
        logits = self.itemsize if ranks == 1 else 2 * (2 + self.itemsize)
        head = min(self.head_chunk, self.eval_tokens) * shape.vocabulary // ranks * logits
        return self.eval_tokens * (4 * shape.hidden + features) * self.itemsize + head


@dataclass(frozen=True, kw_only=True)
class StageWorkspace(TrainedWorkspace):
    """Sizes for trained weights on a stage of a pipeline, for an estimate without scratch, transients and evaluation.

    Attributes:
        own_parameters: number of parameters on this rank.
        stage, stages: pipeline stage of the rank, and number of stages.
        chunks: parts of the network on every stage.
        micro_batches: micro-batches per replica.
        deferred_head: number of micro-batches whose head gradients are deferred.
    """

    own_parameters: int
    stage: int
    stages: int
    chunks: int
    micro_batches: int
    deferred_head: int

    def parameters(self) -> int:
        """Return the number of weights of this rank."""
        return self.own_parameters

    def parts(self, recomputed: int, transposed: int) -> dict[str, float]:
        """Return the bytes by category.

        Args:
            recomputed: number of layers that recompute activations.
            transposed: number of layers that keep their weights transposed.
        """
        shape, layers = self.architecture, self.architecture.layers // self.stages
        units = order(self.stage, self.stages, self.chunks, self.micro_batches)
        in_flight = sum(slots_of_chunks(units).values()) if self.chunk_graphs else most_in_flight(units)
        logits, waiting = 0, 0
        if self.stage == self.stages - 1:
            words = shape.padded_vocabulary(self.ranks) // self.ranks
            logits = self.itemsize * (words + shape.hidden // self.ranks) * self.tokens
            waiting = min(max(1, self.deferred_head if self.stages > 1 else 0), self.micro_batches)
        return {
            STATE: self.state(self.parameters(), bool(self.tokens)),
            "weights in FP8": layers * self.transposed(),
            KEPT: in_flight * (layers // self.chunks) * self.layer(),
            "gradients of logits": waiting * logits,
        }
