"""Decide without a GPU whether a CUDA graph can capture a computation, from the operations that it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FROM_HOST = frozenset({"lift_fresh", "lift_fresh_copy", "lift"})
"""Operations that make a tensor from Python numbers: copies from host memory that is not pinned."""
WAITING = frozenset(
    {
        "_local_scalar_dense", "bincount", "equal", "is_nonzero", "masked_select", "nonzero", "repeat_interleave",
        "unique_consecutive", "unique_dim", "_unique2",
    }
)  # fmt: skip
"""Operations that return a value to the host, or a tensor whose shape depends on values."""
MASKED = frozenset({"index", "index_put", "index_put_"})
"""Operations that wait for the device if an index is a mask."""


class Capturable(TorchDispatchMode):
    """Raises AssertionError, on any device, for operations that a CUDA graph cannot capture."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``function`` if a graph can capture it."""
        name = function.overloadpacket.__name__
        assert name not in FROM_HOST, "a tensor is made of numbers of the host: a copy that no graph can hold"
        assert name not in WAITING, f"{name} waits for the device"
        if name in MASKED:
            masks = [
                index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            ]
            assert not masks, f"{name} with a mask has a shape that depends on values"
        return function(*args, **(kwargs or {}))
