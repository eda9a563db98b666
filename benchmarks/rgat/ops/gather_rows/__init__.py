"""Copies of the rows of a block's nodes from shards on this GPU, on other GPUs, or in host memory.

Rows are plain bytes. Nothing waits for the device: the kernel reads how many nodes of each type are filled, and the
rest of the output stays unchanged.
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
"""Signature: ``gather_rows(rows, node_N, count_T, offsets, out_NB)``; the dtype of a request is uint8."""
