"""Embedding bags: sums of rows of many tables by key, and updates of rows by the sums of their gradients.

Works without autograd: ``pool`` is the forward pass; ``sort`` finds out which keys have the same row, and needs no
gradient, so that it may run beside whatever computes one; ``update`` adds up what all keys of a row contribute, in fp32
and in the order of samples, and only then reads and writes the row and its optimizer's state, once;
``dense_gradient`` leaves the sums for somebody else. Counts stay on the device, and shapes do not depend on keys.
"""

from __future__ import annotations

from common.ops.embedding_bags.bags import AdagradRows, Bag, Bags, Rule, SgdRows, SortedKeys
from common.ops.embedding_bags.reference import (
    EmbeddingBags,
    dense_gradient_reference,
    pool_reference,
    sort_reference,
    update_reference,
)
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

__all__ = ["EMBEDDING_BAGS", "AdagradRows", "Bag", "Bags", "EmbeddingBags", "Rule", "SgdRows", "SortedKeys"]


EMBEDDING_BAGS = Operation(
    "embedding_bags",
    EmbeddingBags(pool_reference, sort_reference, update_reference, dense_gradient_reference),
    {
        "triton": triton_kernels("common.ops.embedding_bags.triton"),
    },
    kernel_names=(("embeddings", r"^embedding_"),),
    cases="common.ops.embedding_bags.cases",
)
"""Functions: :class:`EmbeddingBags`."""
