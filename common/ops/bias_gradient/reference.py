"""The reference of :mod:`common.ops.bias_gradient`."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.triton_support import widen


def row_sums_reference(d_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over the rows as (C,) in ``dtype``. They are taken in fp32, or fp64 for fp64 inputs."""
    return d_RC.sum(0, dtype=widen(d_RC[:0]).dtype).to(dtype)
