"""Embedding bags: sums of rows of many tables by key, and updates of rows by the sums of their gradients.

Works without autograd: ``pool`` is the forward pass; ``sort`` finds out which keys have the same row, and needs no
gradient, so that it may run beside whatever computes one; ``update`` adds up what all keys of a row contribute, in fp32
and in the order of samples, and only then reads and writes the row and its optimizer's state, once;
``dense_gradient`` leaves the sums for somebody else. Counts stay on the device, and shapes do not depend on keys.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.embedding_bags.bags import AdagradRows, Bag, Bags, Rule, SgdRows, SortedKeys
from common.ops.embedding_bags.plain import (
    EmbeddingBags,
    dense_gradient_torch,
    pool_torch,
    sort_torch,
    update_torch,
)
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported

__all__ = ["IMPLEMENTATIONS", "AdagradRows", "Bag", "Bags", "EmbeddingBags", "Rule", "SgdRows", "SortedKeys"]


def _pool_triton(*args: Any) -> None:
    from common.ops.embedding_bags import triton  # triton is imported only where it is used

    triton.pool(*args)


def _sort_triton(ids_NL: Tensor, bags: Bags) -> SortedKeys:
    from common.ops.embedding_bags import triton  # triton is imported only where it is used

    return triton.sort(ids_NL, bags)


def _update_triton(*args: Any, **kwargs: Any) -> None:
    from common.ops.embedding_bags import triton  # triton is imported only where it is used

    triton.update(*args, **kwargs)


def _dense_gradient_triton(*args: Any) -> None:
    from common.ops.embedding_bags import triton  # triton is imported only where it is used

    triton.dense_gradient(*args)


IMPLEMENTATIONS = {
    "triton": Implementation(
        "triton",
        EmbeddingBags(_pool_triton, _sort_triton, _update_triton, _dense_gradient_triton),
        triton_unsupported,
    ),
    "torch": Implementation("torch", EmbeddingBags(pool_torch, sort_torch, update_torch, dense_gradient_torch), always),
}
"""Functions: :class:`EmbeddingBags`."""

KERNEL_NAMES = (("embeddings", r"^embedding_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
