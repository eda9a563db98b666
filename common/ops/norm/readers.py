"""A second tensor for the second consumer of a result. Backward receives both gradients and adds them when it reads
them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def second_reader(y: Tensor) -> Tensor:
    """Return a second tensor on the storage of ``y``. Autograd does not treat it as a view: it has its own gradient."""
    alias = torch.empty(0, dtype=y.dtype, device=y.device)
    alias.set_(y)  # type: ignore[call-overload]
    return alias
