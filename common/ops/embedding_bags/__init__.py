"""Embedding bags: sums of table rows selected by keys, and updates of rows by the sums of their gradients.

The functions work without autograd:

- ``pool`` is the forward pass. It writes to a tensor, or directly to the memory of the ranks that have the samples.
- ``sort`` sorts keys by row. It needs no gradient, so it can run concurrently with other work.
- ``update`` adds the gradients of all keys of a row in fp32 and in the order of samples, then reads and writes the row
  and its optimizer state once.
- ``dense_gradient`` writes these sums for all rows.

Counts stay on the device, and shapes do not depend on keys.
"""

from __future__ import annotations

from common.ops.embedding_bags.bags import AdagradRows, Bag, Bags, PeerVectors, Rule, SgdRows, SortedKeys
from common.ops.embedding_bags.reference import (
    EmbeddingBags,
    dense_gradient_reference,
    pool_reference,
    sort_reference,
    update_reference,
)
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

__all__ = [
    "EMBEDDING_BAGS",
    "AdagradRows",
    "Bag",
    "Bags",
    "EmbeddingBags",
    "PeerVectors",
    "Rule",
    "SgdRows",
    "SortedKeys",
]


EMBEDDING_BAGS = Operation(
    "embedding_bags",
    EmbeddingBags(pool_reference, sort_reference, update_reference, dense_gradient_reference),
    {
        "triton": triton_kernels("common.ops.embedding_bags.triton"),
    },
    kernel_names=(("embeddings", r"^embedding_"),),
    cases="common.ops.embedding_bags.cases",
)
"""Functions: those of :class:`EmbeddingBags`."""
