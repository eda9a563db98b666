"""Estimated GPU memory of a network of blocks under autograd, which recompute activations on two levels.

A block recomputes either all operations but its matrix products, which takes little time, or everything
(:func:`common.nn.recomputation.recomputed`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from common.errors import ConfigError
from common.ops.operation import AUTO
from common.optim.memory_plan import PlannedMemory, TrainedWeights


@dataclass(frozen=True, kw_only=True)
class BlockMemory(PlannedMemory, TrainedWeights):
    """Sizes that determine the memory of one rank.

    Attributes:
        samples: samples of a micro-batch; 0 if the rank only evaluates.
        micro_batches: micro-batches of a step.
        eval_samples: samples of an evaluation batch on this rank; 0 if other ranks evaluate.
        parameters: number of parameters on this rank.
        ranks: number of tp ranks, which split the products over tokens, and the samples between the products.
        fp8: whether products over tokens are in FP8.
        alone: whether there are no other ranks and no communicators.
        can_keep_products: whether a block can recompute all operations but its matrix products.
        asked: number of blocks that recompute everything, and number of further blocks that recompute all operations
            but their matrix products; None if the plan decides.
    """

    samples: int
    micro_batches: int
    eval_samples: int
    parameters: int
    ranks: int = 1
    fp8: bool = False
    alone: bool = True
    can_keep_products: bool = True
    asked: tuple[int, int] | None = None
    remedies: ClassVar[str] = (
        "optimizer.shard=all on several ranks, optimizer.masters=remainder, optimizer.gradients=same, "
        "model.recomputed_blocks=auto and model.recomputed_operations=auto, a smaller micro_batch"
    )

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Number of blocks."""

    @property
    def layers(self) -> int:
        """Number of steps of :meth:`levels`."""
        if not self.samples or self.asked is not None:
            return 0
        return 2 * self.blocks if self.can_keep_products else self.blocks

    def levels(self, steps: int) -> tuple[int, int]:
        """Return how many blocks recompute everything, and how many further ones all but their matrix products.

        With each of the first steps, one more block recomputes all but its matrix products. When all blocks do this,
        one more of them recomputes everything with each further step. If blocks cannot keep products, one more block
        recomputes everything with each step.
        """
        if self.asked is not None:
            everything, operations = self.asked
        elif not self.can_keep_products:
            everything, operations = steps, 0
        else:
            everything, operations = max(0, steps - self.blocks), min(steps, 2 * self.blocks - steps)
        everything = min(everything, self.blocks)
        return everything, min(operations, self.blocks - everything)

    def recomputation(self, recomputed: int) -> str:
        """Return a description for people of what the blocks recompute after ``recomputed`` steps."""
        everything, operations = self.levels(recomputed)
        levels = ((everything, "everything"), (operations, "all but matrix products"))
        return "; ".join(f"{blocks} blocks recompute {what}" for blocks, what in levels if blocks)


def asked_levels(model: Any, can_keep_products: bool) -> tuple[int, int] | None:
    """Return ``recomputed_blocks`` and ``recomputed_operations`` of the section ``model``.

    If one of them is ``auto``, it counts as 0; if both are, the result is None.

    Raises:
        ConfigError: blocks cannot keep their products, but ``recomputed_operations`` asks for it.
    """
    blocks, operations = model.recomputed_blocks, model.recomputed_operations
    if operations not in (AUTO, 0) and not can_keep_products:
        raise ConfigError(
            f"model.recomputed_operations={operations}: blocks cannot keep the results of matrix products with "
            "layout.tp above 1 or model.implementations.linear=te; use model.recomputed_blocks"
        )
    if (blocks, operations) == (AUTO, AUTO):
        return None
    return (0 if blocks == AUTO else blocks, 0 if operations == AUTO else operations)
