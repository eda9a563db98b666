"""Estimate of the GPU memory of a training step on one rank. It is only reported; nothing is rejected because of it.

It counts weights and optimizer state, activations that layers save for pending backward passes, and the gradients of
logits. Scratch buffers, temporaries of products and collectives, and fragmentation take some more gigabytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpt3.architecture import Architecture
from common.distributed.pipeline.order import most_in_flight, order, slots_of_chunks


@dataclass(frozen=True)
class Place:
    """Position of a rank in the layout.

    Attributes:
        stage, stages: pipeline stage of the rank, and number of stages.
        chunks: parts of the network on every stage.
        layer_ranks: number of ranks that share every layer.
        shards: number of ranks that share the optimizer state.
    """

    stage: int
    stages: int
    chunks: int
    layer_ranks: int
    shards: int


@dataclass(frozen=True)
class Step:
    """Sizes of a step on one rank.

    Attributes:
        micro_batches: micro-batches per replica.
        tokens: tokens in a micro-batch, over all ranks that share a layer.
        itemsize: bytes per weight and per activation.
        master_bytes: bytes per fp32 master weight; 0 without masters.
        fp8: whether the products of the blocks use FP8.
        put_off_head: number of micro-batches whose head gradients are deferred.
        gradient_bytes: bytes per gradient of a weight.
        chunk_graphs: whether every chunk permanently allocates its own maximum of saved activations.
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
    """Estimated memory in bytes by category.

    Attributes:
        state: weights, gradients, masters and moments.
        weights_in_fp8: FP8 copies of the weights of products.
        kept: maximum of the activations that are saved for pending backward passes.
        head: gradients of logits.
    """

    state: float
    weights_in_fp8: float
    kept: float
    head: float

    @property
    def total(self) -> float:
        """Sum of all categories."""
        return self.state + self.weights_in_fp8 + self.kept + self.head

    def in_words(self) -> str:
        """Return a description for the user."""
        parts = {
            "weights, gradients and optimizer": self.state,
            "weights in FP8": self.weights_in_fp8,
            "kept for backward passes": self.kept,
            "gradients of logits": self.head,
        }
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
        return f"{self.total / 1e9:.1f} GB and some of scratch ({listed})"


def kept_of_a_token(shape: Architecture, step: Step) -> int:
    """Return the bytes that a layer saves per token, over all its ranks; see :mod:`benchmarks.gpt3.blocks`."""
    wide = 2 + 3 + 1  # two residuals, the QKV result, and the context
    if not step.fp8:
        return step.itemsize * (wide * shape.hidden + shape.feed_forward)
    return step.itemsize * wide * shape.hidden + 2 * shape.hidden + 2 * shape.feed_forward


def expected(shape: Architecture, parameters: int, place: Place, step: Step) -> Expected:
    """Return the estimated memory of one rank.

    Args:
        parameters: number of parameters on this rank.
        place: position of this rank in the layout.
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
