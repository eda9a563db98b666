"""Estimated GPU memory of training FLUX.1 with the faster implementations of its operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.flux1.architecture import FluxArchitecture
from benchmarks.flux1.encodings import EncodingSizes
from common.optim.block_memory import BlockMemory
from common.optim.memory_plan import KEPT, STATE, reserved


@dataclass(frozen=True, kw_only=True)
class FluxMemory(BlockMemory):
    """Sizes that determine the memory of one rank."""

    architecture: FluxArchitecture
    fewer: ClassVar[str] = "model.double_blocks and model.single_blocks"

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.architecture.double_blocks + self.architecture.single_blocks

    def parts(self, recomputed: int, transposed: int) -> dict[str, float]:
        """Return the bytes by category after ``recomputed`` steps of :meth:`levels`."""
        return {
            STATE: self.state(self.parameters, bool(self.samples)),
            "weights in FP8": self.weights_in_fp8(),
            "batches": self.batches(),
            KEPT: self.kept(recomputed),
            "transients": self.transient(recomputed),
            "evaluation": self.evaluation(),
            "reserved": reserved(self.alone),
        }

    def weights_in_fp8(self) -> int:
        """Return the bytes of the weights of products, cast to FP8, and of their transposes."""
        shape = self.architecture
        products = (2 * shape.double_blocks + shape.single_blocks) * shape.stream_products
        return 2 * products // self.ranks if self.fp8 else 0

    def batches(self) -> int:
        """Return the bytes of three steps' encodings: the inputs of a captured step, and two of the prefetcher."""
        elements, sample_id = EncodingSizes.of(self.architecture).sample_elements, 8
        return 3 * self.micro_batches * self.samples * (self.itemsize * elements + sample_id)

    def kept(self, recomputed: int) -> int:
        """Return the bytes kept for the backward pass after ``recomputed`` steps of ``levels``.

        All blocks and the last norm keep their inputs, blocks also other results.
        """
        if not self.samples:
            return 0
        shape, (everything, operations) = self.architecture, self.levels(recomputed)
        whole = self.blocks - everything - operations
        singles = min(shape.single_blocks, whole)
        inputs = (everything + 1) * shape.hidden * self.itemsize + operations * self.products()
        return self._tokens(self.samples) * (
            (whole - singles) * self.double_block() + singles * self.single_block() + inputs
        )

    def products(self) -> int:
        """Return the bytes per token of a block's input and of the results of its products."""
        return self.itemsize * ((1 + 3 + 1 + 1) * self.architecture.hidden + self.architecture.feed_forward)

    def double_block(self) -> int:
        """Return the bytes per token that a double block keeps.

        Results in 16 bits: input, product, rotated queries, keys and values, and attention of the first half; the sum
        of the residual connection; both output products; the product before GELU. Inputs of the products, which may be
        in FP8: both norms, the part of the attention's result that belongs to the stream, and GELU.
        """
        hidden, feed_forward, read = self.architecture.hidden, self.architecture.feed_forward, self._read
        kept = self.itemsize * ((1 + 3 + 3 + 1 + 1 + 2) * hidden + feed_forward)
        return kept + read * (3 * hidden + feed_forward) + self._statistics(2)

    def single_block(self) -> int:
        """Return the bytes per token that a single block keeps.

        Results in 16 bits: input, product, rotated queries, keys and values, attention, both output products, and the
        product before GELU. Inputs of the products: norm, GELU and, in FP8, attention.
        """
        hidden, feed_forward, read = self.architecture.hidden, self.architecture.feed_forward, self._read
        kept = self.itemsize * ((1 + 3 + 3 + 1 + 2) * hidden + feed_forward)
        attended = hidden if self.fp8 else 0
        return kept + read * (hidden + feed_forward) + attended + self._statistics(1)

    def transient(self, recomputed: int) -> int:
        """Return the peak bytes of temporary tensors in the backward pass of a block.

        Two gradients as wide as the MLP, those of queries, keys and values before and after rotation, one weight's
        gradient, and the activations of a block that recomputes them.
        """
        if not self.samples:
            return 0
        shape, tokens = self.architecture, self._tokens(self.samples)
        passing = tokens * self.itemsize * (2 * shape.feed_forward + 6 * shape.hidden)
        weight = shape.hidden * shape.feed_forward * self.gradient_bytes // self.ranks
        again = max(self.double_block(), self.single_block()) if any(self.levels(recomputed)) else 0
        return passing + weight + tokens * again

    def evaluation(self) -> int:
        """Return the bytes of an evaluation's forward pass, whose CUDA graph has its own memory."""
        shape = self.architecture
        return self._tokens(self.eval_samples) * self.itemsize * (2 * shape.feed_forward + 5 * shape.hidden)

    @property
    def _read(self) -> int:
        """Bytes of an element of a product's input."""
        return 1 if self.fp8 else self.itemsize

    def _statistics(self, norms: int) -> int:
        """Return the bytes per token of the moments of norms, and of the log-sum-exps of the attention."""
        return 4 * (2 * norms + self.architecture.heads)

    def _tokens(self, samples: int) -> int:
        return samples * self.architecture.length // self.ranks
