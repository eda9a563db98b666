"""Memory that the layers of a network use one after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """Memory that all layers use one after another for what is large and short-lived.

    An allocator would cut pieces that a layer keeps out of it as soon as it is free, and the next layer would need as
    much again. It grows when a larger size comes, to another address: ask for the largest before a graph is captured.

    Args:
        device: where it lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[str, Tensor] = {}

    def wide(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A result as wide as the MLP; its values are valid until the next is asked for."""
        return self.slot("wide", shape, dtype)

    def turned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A transposed weight, likewise."""
        return self.slot("turned", shape, dtype)

    def slot(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of that name; its values are valid until it is asked for again."""
        needed = math.prod(shape) * dtype.itemsize
        if name not in self._slots or self._slots[name].numel() < needed:
            self._slots.pop(name, None)
            self._slots[name] = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return self._slots[name][:needed].view(dtype).view(shape)
