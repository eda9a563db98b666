"""Rows of a block's nodes, copied out of shards that lie on this GPU, on others, or in the host's memory.

Rows are bytes: what is copied need not be known as numbers. Nothing waits for the device: how many nodes of a type are
there is read where they are copied, and what lies beyond them stays as it is.
"""

from __future__ import annotations

from typing import Any

from benchmarks.rgat.ops.gather_rows.plain import gather_rows_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import no_triton


def _gather_rows_triton(*args: Any, **kwargs: Any) -> None:
    from benchmarks.rgat.ops.gather_rows.triton import gather_rows  # triton is imported only where it is used

    gather_rows(*args, **kwargs)


def _unsupported(request: OperationRequest) -> str | None:
    return no_triton(request.device)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _gather_rows_triton, _unsupported),
    "torch": Implementation("torch", gather_rows_torch, always),
}
"""Signature: ``gather_rows(rows, node_N, count_T, offsets, out_NB, programs)``; a request's dtype is uint8."""

KERNEL_NAMES = (("gather", r"^gather_rows_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
