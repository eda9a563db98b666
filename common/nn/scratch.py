"""Temporary buffers that the layers of a network share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """Buffers that all layers reuse for large temporaries.

    With the caching allocator instead, activations that a layer keeps could be placed inside the freed block, and the
    next layer would need a second block of the same size. A buffer grows when a larger size is requested and then
    moves to another address. Therefore, request the largest size before a CUDA graph is captured.

    Args:
        device: device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[str, Tensor] = {}

    def wide(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the buffer for a tensor as wide as the MLP. Its values are valid until the next call."""
        return self.slot("wide", shape, dtype)

    def turned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the buffer for a transposed weight. Its values are valid until the next call."""
        return self.slot("turned", shape, dtype)

    def slot(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the buffer ``name``. Its values are valid until the next call with the same name."""
        needed = math.prod(shape) * dtype.itemsize
        if name not in self._slots or self._slots[name].numel() < needed:
            self._slots.pop(name, None)
            self._slots[name] = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return self._slots[name][:needed].view(dtype).view(shape)
