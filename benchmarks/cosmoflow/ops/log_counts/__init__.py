"""Logarithm of particle counts: ``log(1 + x)`` of int16 counts, in the dtype of the activations.

Prepared samples are channels last, so the result is a channels_last_3d volume without a transposition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels


def log_counts_reference(counts_NDHWC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``log(1 + counts)`` as (N, C, D, H, W) in ``dtype``, a view of (N, D, H, W, C) memory.

    The logarithm is computed in fp32, or in fp64 for that dtype.

    Args:
        counts_NDHWC: int16, not negative.
    """
    counts = counts_NDHWC.to(torch.promote_types(dtype, torch.float32))
    return counts.log1p().to(dtype).movedim(-1, 1)


LOG_COUNTS = Operation(
    "log_counts",
    log_counts_reference,
    {"triton": triton_kernels("benchmarks.cosmoflow.ops.log_counts.triton:log_counts")},
    kernel_names=(("logarithm of the counts", r"^log_counts_"),),
    cases="benchmarks.cosmoflow.ops.log_counts.cases",
)
"""Signature: ``log_counts(counts_NDHWC, dtype)``."""
