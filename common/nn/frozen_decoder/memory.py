"""What a frozen decoder needs of a GPU's memory, before any of it is taken."""

from __future__ import annotations

from dataclasses import dataclass

from common.distributed.tensor_parallel.overlap import SLOTS
from common.errors import ConfigError
from common.nn.decoder import DecoderArchitecture

ADAPTER_BYTES = 16
"""Of an adapter's weight: bf16 weight and gradient, fp32 master and two moments."""

RESERVED = 4_000_000_000
"""CUDA's context (0.4 GB), libraries' workspaces, and what the allocator leaves between blocks: measured on an H200."""

COMMUNICATORS = 1_000_000_000
"""NCCL's buffers, which lie outside PyTorch's allocator: 0.8 GB were measured for data parallelism on two GPUs."""


TRAINING_REMEDIES = (
    "model.recomputed_qkv=auto, model.transposed_layers=auto, model.linear=fp8, a smaller micro_batch, more ranks of "
    "layout.cp or layout.tp"
)
EVALUATION_REMEDIES = "model.linear=fp8, a smaller reader.eval_rows, more ranks of evaluation.layout.tp"


@dataclass(frozen=True)
class Workspace:
    """The work of one rank.

    Attributes:
        architecture: shapes.
        tokens: T, of the micro-batch, under context parallelism this rank's; 0 where a rank only evaluates.
        ranks: of tp, each with a part of every layer and of the residual stream's tokens.
        sharers: ranks of cp, all of which have the keys and values of whole rows.
        eval_tokens: tokens of an evaluation's batch on this rank; 0 where other ranks evaluate.
        rank: of the adapters.
        itemsize: bytes of an activation.
        fp8: products in FP8 and SwiGLU's input kept so.
        head_chunk: tokens whose logits are there at a time.
        alone: no other ranks, and no communicators.
        cast_apart: nothing writes FP8 itself: 16 bits are there beside it.
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
        """Bytes of the frozen weights."""
        shape = self.architecture
        products = shape.layers * shape.products_per_layer
        return (
            products * (1 if self.fp8 else self.itemsize) + (shape.parameters - products) * self.itemsize
        ) // self.ranks

    def transposed(self) -> int:
        """Bytes of a layer's transposed weights, which products in 16 bits do without."""
        return self.architecture.products_per_layer // self.ranks if self.fp8 else 0

    def adapters(self) -> int:
        """Bytes of the adapters, half of which is split; in training with gradients and the optimizer's state."""
        shape = self.architecture
        whole, split = 2 * shape.hidden, shape.qkv_features + shape.attention_features
        each = ADAPTER_BYTES if self.tokens else self.itemsize
        return shape.layers * self.rank * (whole + split // self.ranks) * each

    def qkv(self) -> int:
        """Bytes of a layer's query, key and value."""
        shape = self.architecture
        keys_and_values = (shape.qkv_features - shape.attention_features) * self.sharers
        return self.tokens * (shape.attention_features + keys_and_values) * self.itemsize // self.ranks

    def layer(self) -> int:
        """Bytes that a layer keeps for the backward pass, query, key and value among them."""
        shape = self.architecture
        stream = 2 * shape.hidden * self.itemsize + 2 * 4
        attention = shape.attention_features * self.itemsize + 4 * shape.heads
        swiglu = 2 * shape.feed_forward * (1 if self.fp8 else self.itemsize)
        split = self.tokens * (stream + attention + swiglu) // self.ranks
        return self.qkv() + split + self.tokens * 2 * self.rank * self.itemsize

    def scratch(self) -> int:
        """Bytes that all layers use one after another: the MLP's product in 16 bits, and a transposed weight in FP8."""
        shape = self.architecture
        tokens = max(self.tokens, self.eval_tokens) if self.fp8 else self.tokens
        wide = 2 * tokens * shape.feed_forward * self.itemsize
        return (wide + 2 * shape.feed_forward * shape.hidden) // self.ranks if self.fp8 else wide // (2 * self.ranks)

    def transient(self) -> int:
        """Bytes at training's highest point beside what is kept: inside an MLP's backward pass, or under the head."""
        if not self.tokens:
            return 0
        shape, ranks = self.architecture, self.ranks
        hidden = self.tokens * shape.hidden * self.itemsize
        gate_up = 2 * self.tokens * shape.feed_forward * self._computed(self.itemsize) // ranks
        head = self.head_chunk * shape.vocabulary * (4 + 2 * self.itemsize) // ranks
        return 5 * hidden + max(gate_up, head)

    def evaluation(self) -> int:
        """Bytes of an evaluation's forward pass, whose graph has memory of its own."""
        shape, ranks = self.architecture, self.ranks
        features = 4 * shape.hidden + (2 * shape.qkv_features + shape.attention_features) // ranks
        act = shape.feed_forward * self._computed(3 * self.itemsize) // ranks
        head = self.head_chunk * shape.vocabulary * (4 + 2 * self.itemsize) // ranks
        return self.eval_tokens * (features * self.itemsize + act) + (head if self.eval_tokens else 0)

    def _computed(self, half: int) -> int:
        """Bytes of a value that a product reads next; ``half`` where products are in 16 bits."""
        return half if not self.fp8 else 1 + self.itemsize * self.cast_apart

    def reserved(self) -> int:
        """Bytes beside the allocator's tensors: those of libraries, and slots in which tokens move between ranks."""
        slot = max(self.tokens, self.eval_tokens) * self.architecture.hidden * self.itemsize
        return RESERVED + (0 if self.alone else COMMUNICATORS) + (SLOTS * slot if self.ranks > 1 else 0)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one GPU.

    Attributes:
        frozen, adapters, kept, scratch, transient, evaluation, reserved: see :class:`Workspace`; ``kept`` is of all
            layers.
        transposed: of all layers' weights that are kept transposed, too.
        recomputed_qkv: layers that compute query, key and value again, whose bytes are not in ``kept``.
        transposed_layers: layers whose weights are kept transposed, too.
        capacity: of the GPU.
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
        """All of it."""
        passing = self.scratch + self.transient + self.evaluation
        lasting = self.frozen + self.adapters + self.kept + self.transposed
        return lasting + passing + self.reserved

    def in_words(self) -> str:
        """For people."""
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
    """Fit a rank's work into ``capacity`` bytes.

    Args:
        workspace: of the rank.
        capacity: of its GPU.
        recomputed_qkv: layers that compute query, key and value again; None for as few as fit.
        transposed_layers: layers that keep their weights transposed, too; None for as many as fit beside all else.

    Raises:
        ConfigError: it does not fit, with bytes and remedies.
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
