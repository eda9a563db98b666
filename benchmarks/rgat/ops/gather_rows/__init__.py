"""Rows of a block's nodes, copied out of shards that lie on this GPU, on others, or in the host's memory.

Rows are bytes: what is copied need not be known as numbers. Nothing waits for the device: how many nodes of a type are
there is read where they are copied, and what lies beyond them stays as it is.
"""

from __future__ import annotations

from benchmarks.rgat.ops.gather_rows.reference import gather_rows_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

GATHER_ROWS = Operation(
    "gather_rows",
    gather_rows_reference,
    {
        "triton": triton_kernels("benchmarks.rgat.ops.gather_rows.triton:gather_rows", dtypes=()),
    },
    kernel_names=(("gather", r"^gather_rows_"),),
    cases="benchmarks.rgat.ops.gather_rows.cases",
)
"""Signature: ``gather_rows(rows, node_N, count_T, offsets, out_NB)``; a request's dtype is uint8."""
