"""A result for two readers, so that backward gets their gradients apart and adds them where it reads them."""

from __future__ import annotations

import torch
from torch import Tensor


def second_reader(y: Tensor) -> Tensor:
    """A second tensor on the storage of ``y`` that autograd does not see as a view: it has a gradient of its own."""
    alias = torch.empty(0, dtype=y.dtype, device=y.device)
    alias.set_(y)  # type: ignore[call-overload]
    return alias
