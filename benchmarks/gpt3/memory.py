"""What a rank's training step is expected to keep of its GPU's memory, for people: nothing is refused by it.

It counts what grows with the network and the pipeline: weights and their like, what layers keep of micro-batches on
their way, and the head's logits. Scratch, what products and collectives take for a moment, and what lies unused between
blocks come on top: some gigabytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpt3.architecture import Architecture
from common.distributed.pipeline.order import most_in_flight, order, slots_of_chunks


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        stage, stages: of the pipeline.
        chunks: parts of the network on every stage.
        layer_ranks: that share every layer.
        shards: ranks that share the optimizer's state.
    """

    stage: int
    stages: int
    chunks: int
    layer_ranks: int
    shards: int


@dataclass(frozen=True)
class Step:
    """What a rank does in a step.

    Attributes:
        micro_batches: of a replica.
        tokens: of a micro-batch, on all ranks of a layer.
        itemsize: bytes of a weight and an activation.
        master_bytes: of a weight's fp32 master beside it; 0 without one.
        fp8: products of the blocks are in FP8.
        put_off_head: micro-batches whose gradients of logits wait.
        gradient_bytes: of a weight's gradient.
        chunk_graphs: every chunk keeps memory for the most micro-batches that it has under way, whatever others have.
    """

    micro_batches: int
    tokens: int
    itemsize: int
    master_bytes: int
    fp8: bool
    put_off_head: int
    gradient_bytes: int
    chunk_graphs: bool = False


@dataclass(frozen=True)
class Expected:
    """Bytes by kind.

    Attributes:
        state: weights, gradients, masters and moments.
        weights_in_fp8: of the products.
        kept: for backward passes that are yet to come, when most are, or by graphs of chunks at all times.
        head: gradients of logits.
    """

    state: float
    weights_in_fp8: float
    kept: float
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.state + self.weights_in_fp8 + self.kept + self.head

    def in_words(self) -> str:
        """For people."""
        parts = {
            "weights, gradients and optimizer": self.state,
            "weights in FP8": self.weights_in_fp8,
            "kept for backward passes": self.kept,
            "gradients of logits": self.head,
        }
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
        return f"{self.total / 1e9:.1f} GB and some of scratch ({listed})"


def kept_of_a_token(shape: Architecture, step: Step) -> int:
    """Bytes that a layer keeps of a token on all its ranks; see :mod:`benchmarks.gpt3.blocks`."""
    wide = 2 + 3 + 1  # two residuals, the QKV result, and the context
    if not step.fp8:
        return step.itemsize * (wide * shape.hidden + shape.feed_forward)
    return step.itemsize * wide * shape.hidden + 2 * shape.hidden + 2 * shape.feed_forward


def expected(shape: Architecture, parameters: int, place: Place, step: Step) -> Expected:
    """The memory of one rank.

    Args:
        shape: of the network.
        parameters: that this rank has.
        place: see there.
        step: see there.
    """
    layers = shape.layers // place.stages
    weights = layers * shape.products_per_layer / place.layer_ranks
    units = order(place.stage, place.stages, place.chunks, step.micro_batches)
    in_flight = sum(slots_of_chunks(units).values()) if step.chunk_graphs else most_in_flight(units)
    of_a_part = layers // place.chunks * step.tokens * kept_of_a_token(shape, step) / place.layer_ranks
    logits, waiting = 0.0, 0
    if place.stage == place.stages - 1:
        words = shape.padded_vocabulary(place.layer_ranks) / place.layer_ranks
        logits = step.itemsize * (words + shape.hidden / place.layer_ranks) * step.tokens
        waiting = min(max(1, step.put_off_head if place.stages > 1 else 0), step.micro_batches)
    both = step.itemsize + step.gradient_bytes
    shared = step.master_bytes + 2 * max(4, step.itemsize) + (both if place.shards > 1 else 0)
    return Expected(
        parameters * (both + shared / place.shards),
        step.fp8 * weights,
        in_flight * of_a_part,
        waiting * logits,
    )
