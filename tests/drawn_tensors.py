"""Random tensors, FP8 scales and comparisons for tests of operations."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.fp8_cast.reference import Scaling


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return values of a standard normal distribution, drawn in fp32 and rounded to ``dtype``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(*shape: int, seed: int = 0) -> Tensor:
    """Return float64 values of a standard normal distribution."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scaling(scale: float = 0.0) -> Scaling:
    """Return the state of an FP8 scale; ``scale`` is 0 before the first use."""
    return Scaling(torch.tensor(scale), torch.zeros(2, dtype=torch.int32))


def assert_close(found: Tensor | None, expected: Tensor) -> None:
    """Check a float64 result up to the rounding of a few operations."""
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
