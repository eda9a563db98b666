"""One choice of implementation for all layers of a kind in a network."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Choosing(Protocol):
    """A layer with several implementations."""

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose one for activations on the device of the layer's parameters.

        Args:
            requested: a name, or ``auto``.
            dtype: of the activations.

        Returns:
            The name chosen.

        Raises:
            UnsupportedImplementation: see :func:`common.ops.implementation.select`.
        """
        ...


def choose(model: nn.Module, kind: type[Choosing], requested: str, dtype: torch.dtype) -> str:
    """Choose the implementation of every layer of a kind; call it once the model is on its device.

    Args:
        model: holds the layers.
        kind: their class.
        requested: a name, or ``auto``.
        dtype: of the activations.

    Returns:
        The names chosen, joined by ``+`` where layers differ.

    Raises:
        UnsupportedImplementation: see :func:`common.ops.implementation.select`.
    """
    layers: list[Choosing] = [module for module in model.modules() if isinstance(module, kind)]
    return "+".join(sorted({layer.choose(requested, dtype) for layer in layers}))
