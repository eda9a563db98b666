"""The reference of :mod:`common.ops.bias_gradient`. Shapes: R rows, C columns."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.triton_support import widen


def row_sums_reference(d_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums over the rows of ``d_RC``, taken in fp32 (fp64 stays), (C,) of ``dtype``."""
    return d_RC.sum(0, dtype=widen(d_RC[:0]).dtype).to(dtype)
