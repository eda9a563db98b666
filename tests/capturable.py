"""Whether a computation can be recorded as a CUDA graph, judged without a GPU by the operations that it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FROM_HOST = frozenset({"lift_fresh", "lift_fresh_copy", "lift"})
"""What makes a tensor of Python's numbers: a copy from memory of the host that is not pinned."""
WAITING = frozenset(
    {
        "_local_scalar_dense", "bincount", "equal", "is_nonzero", "masked_select", "nonzero", "repeat_interleave",
        "unique_consecutive", "unique_dim", "_unique2",
    }
)  # fmt: skip
"""What gives the host a value, or a shape that depends on values."""
MASKED = frozenset({"index", "index_put", "index_put_"})
"""What waits if an index is a mask."""


class Capturable(TorchDispatchMode):
    """Within it what no CUDA graph can hold raises AssertionError, on any device."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``function`` if a graph can hold it."""
        name = function.overloadpacket.__name__
        assert name not in FROM_HOST, "a tensor is made of numbers of the host: a copy that no graph can hold"
        assert name not in WAITING, f"{name} waits for the device"
        if name in MASKED:
            masks = [
                index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            ]
            assert not masks, f"{name} with a mask has a shape that depends on values"
        return function(*args, **(kwargs or {}))
