"""Estimated GPU memory of a trained decoder, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from common.distributed.tensor_parallel.overlap import SLOTS
from common.errors import ConfigError
from common.nn.decoder import DecoderArchitecture

MOMENTS = 8
"""Bytes of a weight's two moments in fp32."""

RESERVED = 4_000_000_000
"""Bytes for CUDA's context (0.4 GB), library workspaces and allocator fragmentation."""

COMMUNICATORS = 1_000_000_000
"""Bytes of NCCL's buffers outside PyTorch's allocator."""

REMEDIES = (
    "optimizer.masters=remainder, optimizer.gradients=same, optimizer.shard=all on several ranks, "
    "model.recomputed_gate_up=auto, a smaller micro_batch or model.head_chunk, more ranks of layout.cp or layout.tp"
)


@dataclass(frozen=True)
class Workspace:
    """Sizes that determine the memory of one rank.

    Attributes:
        tokens: T of the micro-batch, or this cp rank's part of it; 0 if the rank only evaluates.
        sharers: number of cp ranks. Each keeps the keys and values of whole rows.
        eval_tokens: tokens of an evaluation batch on this rank; 0 if other ranks evaluate.
        itemsize: bytes of a weight element and of an activation element.
        master_bytes: bytes of a weight's master; 0 without separate masters.
        shards: number of ranks over which masters, moments and the update are sharded.
        fp8: whether products are in FP8.
        head_chunk: number of tokens whose logits exist at the same time.
        alone: whether there are no other ranks and no communicators.
        layer_ranks: number of tp ranks, which split every layer and its tokens.
        transposed_layers: number of layers that also keep their FP8 weights transposed.
        gradient_bytes: bytes of a weight's gradient.
        chunk_graphs: whether forward and backward passes have separate CUDA graphs, each with its own memory.
    """

    architecture: DecoderArchitecture
    tokens: int
    sharers: int
    eval_tokens: int
    itemsize: int
    master_bytes: int
    shards: int
    fp8: bool
    head_chunk: int
    alone: bool
    layer_ranks: int = 1
    transposed_layers: int = 0
    gradient_bytes: int = 2
    chunk_graphs: bool = False

    def parameters(self) -> int:
        """Return the number of weights of this rank. Norms are replicated, all other weights are split over tp."""
        norms = (2 * self.architecture.layers + 1) * self.architecture.hidden
        return (self.architecture.parameters - norms) // self.layer_ranks + norms

    def state(self) -> int:
        """Return the bytes of weights, gradients, masters and moments.

        Sharding adds a copy of the shard's weights and gradients.
        """
        if not self.tokens:
            return self.parameters() * self.itemsize
        both = self.itemsize + self.gradient_bytes
        copies = both if self.shards > 1 else 0
        shared = (self.master_bytes + MOMENTS + copies) / self.shards
        return round(self.parameters() * (both + shared))

    def weights_in_fp8(self) -> int:
        """Return the bytes of the weights cast to FP8, once per step or evaluation, and of the kept transposes."""
        layers = self.architecture.layers
        kept = layers + min(self.transposed_layers, layers)
        products = kept * self.architecture.products_per_layer // self.layer_ranks
        return products if self.fp8 else 0

    def gate_up(self) -> int:
        """Return the bytes that a layer's MLP keeps, unless the layer recomputes gate and up."""
        features = self.architecture.feed_forward
        return self.tokens * (3 * features if self.fp8 else 2 * features * self.itemsize) // self.layer_ranks

    def layer(self) -> int:
        """Return the bytes that one layer keeps for the backward pass."""
        shape = self.architecture
        stream = 2 * shape.hidden * self.itemsize + 2 * 4 + (2 * shape.hidden if self.fp8 else 0)
        keys_and_values = (shape.qkv_features - shape.attention_features) * self.sharers
        attention = (2 * shape.attention_features + keys_and_values) * self.itemsize + 4 * shape.heads
        return self.tokens * (stream + attention) // self.layer_ranks + self.gate_up()

    def scratch(self, recomputes: bool) -> int:
        """Return the bytes of the buffers that all layers share. ``recomputes``: a layer recomputes gate and up."""
        hidden, features = self.architecture.hidden, 2 * self.architecture.feed_forward // self.layer_ranks
        passing = max(self.tokens if self.fp8 or recomputes else 0, self.eval_tokens)
        weight = features * hidden
        widest = max(features, hidden) + max(features // 2, hidden)
        turned = (weight + self.tokens * widest + weight * self.gradient_bytes) if self.fp8 else 0
        return passing * features * self.itemsize + (turned if self.tokens else 0)

    def transient(self) -> int:
        """Return the peak bytes of training's temporaries, either in an MLP's backward pass or in the head."""
        if not self.tokens:
            return 0
        return (2 if self.chunk_graphs else 1) * self._transient_of_a_pass()

    def _transient_of_a_pass(self) -> int:
        shape, ranks = self.architecture, self.layer_ranks
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
        shape, ranks = self.architecture, self.layer_ranks
        features = (2 * shape.qkv_features + shape.attention_features + shape.feed_forward) // ranks
        logits = self.itemsize if ranks == 1 else 2 * (2 + self.itemsize)
        head = min(self.head_chunk, self.eval_tokens) * shape.vocabulary // ranks * logits
        return self.eval_tokens * (4 * shape.hidden + features) * self.itemsize + head

    def reserved(self) -> int:
        """Return the bytes outside PyTorch's allocator, plus the buffers that move tokens between ranks."""
        slot = max(self.tokens, self.eval_tokens) * self.architecture.hidden * self.itemsize
        return RESERVED + (0 if self.alone else COMMUNICATORS) + (SLOTS * slot if self.layer_ranks > 1 else 0)


@dataclass(frozen=True)
class MemoryPlan:
    """Planned bytes on one GPU, by category.

    Attributes:
        state, weights_in_fp8, scratch, transient, evaluation, reserved: see :class:`Workspace`.
        kept: bytes that all layers keep for the backward pass.
        recomputed_gate_up: number of layers that recompute gate and up; ``kept`` excludes their bytes.
        capacity: bytes of the GPU's memory.
    """

    state: int
    weights_in_fp8: int
    kept: int
    scratch: int
    transient: int
    evaluation: int
    reserved: int
    recomputed_gate_up: int
    capacity: int

    @property
    def total(self) -> int:
        """Sum of all categories in bytes."""
        lasting = self.state + self.weights_in_fp8 + self.kept
        return lasting + self.scratch + self.transient + self.evaluation + self.reserved

    def in_words(self) -> str:
        """Return a description for people, in GB."""
        parts = {
            "weights, gradients and optimizer": self.state,
            "weights in FP8": self.weights_in_fp8,
            "kept for the backward pass": self.kept,
            "scratch": self.scratch,
            "transients": self.transient,
            "evaluation": self.evaluation,
            "reserved": self.reserved,
        }
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
        if self.recomputed_gate_up:
            listed += f"; {self.recomputed_gate_up} layers multiply gate and up once more"
        return f"{self.total / 1e9:.1f} GB of {self.capacity / 1e9:.1f} ({listed})"


def plan(workspace: Workspace, capacity: int, recomputed_gate_up: int | None) -> MemoryPlan:
    """Fit the memory of a rank into ``capacity`` bytes.

    Args:
        capacity: bytes of the GPU's memory.
        recomputed_gate_up: number of layers that recompute gate and up; None for as few as possible.

    Raises:
        ConfigError: the work does not fit. The message gives sizes and remedies.
    """
    layers = workspace.architecture.layers if workspace.tokens else 0

    def dropping(count: int) -> MemoryPlan:
        return MemoryPlan(
            workspace.state(),
            workspace.weights_in_fp8(),
            layers * workspace.layer() - count * workspace.gate_up(),
            workspace.scratch(count > 0),
            workspace.transient(),
            workspace.evaluation(),
            workspace.reserved(),
            count,
            capacity,
        )

    if recomputed_gate_up is None:
        fitting = (count for count in range(layers) if dropping(count).total <= capacity)
        recomputed_gate_up = next(fitting, layers)
    found = dropping(min(recomputed_gate_up, layers))
    if found.total > capacity:
        raise ConfigError(
            f"this layout needs {found.in_words()}: {(found.total - capacity) / 1e9:.1f} GB are missing; "
            f"use {REMEDIES}, or fewer model.layers"
        )
    return found
