"""Estimated GPU memory of a frozen decoder, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from common.distributed.tensor_parallel.overlap import SLOTS
from common.errors import ConfigError
from common.nn.decoder import DecoderArchitecture

ADAPTER_BYTES = 16
"""Bytes per adapter weight in training: bf16 weight and gradient, fp32 master and two moments."""

RESERVED = 4_000_000_000
"""Bytes for CUDA's context (0.4 GB), library workspaces and allocator fragmentation, measured on an H200."""

COMMUNICATORS = 1_000_000_000
"""Bytes of NCCL's buffers outside PyTorch's allocator; 0.8 GB were measured for data parallelism on two GPUs."""


TRAINING_REMEDIES = (
    "model.recomputed_qkv=auto, model.transposed_layers=auto, model.linear=fp8, a smaller micro_batch, more ranks of "
    "layout.cp or layout.tp"
)
EVALUATION_REMEDIES = "model.linear=fp8, a smaller reader.eval_rows, more ranks of evaluation.layout.tp"


@dataclass(frozen=True)
class Workspace:
    """Sizes that determine the memory of one rank.

    Attributes:
        tokens: T of the micro-batch, or this cp rank's part of it; 0 if the rank only evaluates.
        ranks: number of tp ranks, which split every layer and the tokens of the residual stream.
        sharers: number of cp ranks. Each keeps the keys and values of whole rows.
        eval_tokens: tokens of an evaluation batch on this rank; 0 if other ranks evaluate.
        rank: rank of the adapters.
        itemsize: bytes of an activation element.
        fp8: whether products are in FP8, and SwiGLU's input is kept in FP8.
        head_chunk: number of tokens whose logits exist at the same time.
        alone: whether there are no other ranks and no communicators.
        cast_apart: whether separate passes cast to FP8, so that the 16-bit values exist beside the FP8 values.
    """

    architecture: DecoderArchitecture
    tokens: int
    ranks: int
    sharers: int
    eval_tokens: int
    rank: int
    itemsize: int
    fp8: bool
    head_chunk: int
    alone: bool
    cast_apart: bool = False

    def frozen(self) -> int:
        """Return the bytes of the frozen weights."""
        shape = self.architecture
        products = shape.layers * shape.products_per_layer
        return (
            products * (1 if self.fp8 else self.itemsize) + (shape.parameters - products) * self.itemsize
        ) // self.ranks

    def transposed(self) -> int:
        """Return the bytes of one layer's transposed weights; 0 for products in 16 bits, which need none."""
        return self.architecture.products_per_layer // self.ranks if self.fp8 else 0

    def adapters(self) -> int:
        """Return the bytes of the adapters, with gradients and optimizer state if the rank trains."""
        shape = self.architecture
        whole, split = 2 * shape.hidden, shape.qkv_features + shape.attention_features
        each = ADAPTER_BYTES if self.tokens else self.itemsize
        return shape.layers * self.rank * (whole + split // self.ranks) * each

    def qkv(self) -> int:
        """Return the bytes of one layer's query, key and value."""
        shape = self.architecture
        keys_and_values = (shape.qkv_features - shape.attention_features) * self.sharers
        return self.tokens * (shape.attention_features + keys_and_values) * self.itemsize // self.ranks

    def layer(self) -> int:
        """Return the bytes that one layer keeps for the backward pass, including query, key and value."""
        shape = self.architecture
        stream = 2 * shape.hidden * self.itemsize + 2 * 4
        attention = shape.attention_features * self.itemsize + 4 * shape.heads
        swiglu = 2 * shape.feed_forward * (1 if self.fp8 else self.itemsize)
        split = self.tokens * (stream + attention + swiglu) // self.ranks
        return self.qkv() + split + self.tokens * 2 * self.rank * self.itemsize

    def scratch(self) -> int:
        """Return the bytes of the buffers that all layers share: an MLP product, and in FP8 a transposed weight."""
        shape = self.architecture
        tokens = max(self.tokens, self.eval_tokens) if self.fp8 else self.tokens
        wide = 2 * tokens * shape.feed_forward * self.itemsize
        return (wide + 2 * shape.feed_forward * shape.hidden) // self.ranks if self.fp8 else wide // (2 * self.ranks)

    def transient(self) -> int:
        """Return the peak bytes of training's temporaries, either in an MLP's backward pass or in the head."""
        if not self.tokens:
            return 0
        shape, ranks = self.architecture, self.ranks
        hidden = self.tokens * shape.hidden * self.itemsize
        gate_up = 2 * self.tokens * shape.feed_forward * self._computed(self.itemsize) // ranks
        head = self.head_chunk * shape.vocabulary * (4 + 2 * self.itemsize) // ranks
        return 5 * hidden + max(gate_up, head)

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

    def reserved(self) -> int:
        """Return the bytes outside PyTorch's allocator, plus the buffers that move tokens between ranks."""
        slot = max(self.tokens, self.eval_tokens) * self.architecture.hidden * self.itemsize
        return RESERVED + (0 if self.alone else COMMUNICATORS) + (SLOTS * slot if self.ranks > 1 else 0)


@dataclass(frozen=True)
class MemoryPlan:
    """Planned bytes on one GPU, by category.

    Attributes:
        frozen, adapters, scratch, transient, evaluation, reserved: see :class:`Workspace`.
        kept: bytes that all layers keep for the backward pass.
        transposed: bytes of the kept transposed weights of all layers.
        recomputed_qkv: number of layers that recompute query, key and value; ``kept`` excludes their bytes.
        transposed_layers: number of layers that also keep their weights transposed.
        capacity: bytes of the GPU's memory.
    """

    frozen: int
    adapters: int
    kept: int
    transposed: int
    scratch: int
    transient: int
    evaluation: int
    reserved: int
    recomputed_qkv: int
    transposed_layers: int
    capacity: int

    @property
    def total(self) -> int:
        """Sum of all categories in bytes."""
        passing = self.scratch + self.transient + self.evaluation
        lasting = self.frozen + self.adapters + self.kept + self.transposed
        return lasting + passing + self.reserved

    def in_words(self) -> str:
        """Return a description for people, in GB."""
        parts = {
            "frozen weights": self.frozen,
            "adapters": self.adapters,
            "kept for the backward pass": self.kept,
            "transposed weights": self.transposed,
            "scratch": self.scratch,
            "transients": self.transient,
            "evaluation": self.evaluation,
            "reserved": self.reserved,
        }
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
        for layers, what in (
            (self.recomputed_qkv, "compute query, key and value again"),
            (self.transposed_layers, "keep their weights transposed, too"),
        ):
            listed += f"; {layers} layers {what}" if layers else ""
        return f"{self.total / 1e9:.1f} GB of {self.capacity / 1e9:.1f} ({listed})"


def plan(workspace: Workspace, capacity: int, recomputed_qkv: int | None, transposed_layers: int | None) -> MemoryPlan:
    """Fit the memory of a rank into ``capacity`` bytes.

    Args:
        capacity: bytes of the GPU's memory.
        recomputed_qkv: number of layers that recompute query, key and value; None for as few as possible.
        transposed_layers: number of layers that also keep their weights transposed; None for as many as fit into the
            remaining memory.

    Raises:
        ConfigError: the work does not fit. The message gives sizes and remedies.
    """
    layers = workspace.architecture.layers if workspace.tokens else 0
    turned = min(transposed_layers or 0, layers) if workspace.transposed() else 0

    def dropping(recomputed: int) -> MemoryPlan:
        kept = layers * workspace.layer() - recomputed * workspace.qkv()
        lasting = (workspace.frozen(), workspace.adapters(), kept, turned * workspace.transposed())
        passing = (workspace.scratch(), workspace.transient(), workspace.evaluation(), workspace.reserved())
        return MemoryPlan(*lasting, *passing, recomputed, turned, capacity)

    if recomputed_qkv is None:
        recomputed = next((count for count in range(layers) if dropping(count).total <= capacity), layers)
    else:
        recomputed = min(recomputed_qkv, layers)
    if transposed_layers is None and workspace.transposed():
        room = capacity - dropping(recomputed).total
        turned = min(layers, max(0, room) // workspace.transposed())
    found = dropping(recomputed)
    if found.total > capacity:
        raise ConfigError(
            f"this layout needs {found.in_words()}: {(found.total - capacity) / 1e9:.1f} GB are missing; "
            f"use {TRAINING_REMEDIES if workspace.tokens else EVALUATION_REMEDIES}, or fewer model.layers"
        )
    return found
