"""The choice of implementations for the layers of a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from common.ops.operation import AUTO, OPTION, asked_for


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
            UnsupportedImplementation: see :meth:`common.ops.operation.Operation.select`.
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
        UnsupportedImplementation: see :meth:`common.ops.operation.Operation.select`.
    """
    layers: list[Choosing] = [module for module in model.modules() if isinstance(module, kind)]
    return "+".join(sorted({layer.choose(requested, dtype) for layer in layers}))


def choose_layers(
    model: nn.Module, kinds: Mapping[str, type[Choosing]], requested: Mapping[str, str], dtype: torch.dtype
) -> dict[str, str]:
    """Choose the implementations of layers of several kinds; see :func:`choose`.

    Args:
        model: holds the layers.
        kinds: name of an operation to the class of the layers that run it.
        requested: ``model.implementations``. The choice for an operation that it does not name is ``auto``.
        dtype: of the activations.

    Returns:
        Name of the operation to the names chosen.

    Raises:
        UnsupportedImplementation: naming the key of the configuration.
    """
    chosen = {}
    for name, kind in kinds.items():
        wanted = requested.get(name, AUTO)
        with asked_for(f"{OPTION}.{name}", wanted):
            chosen[name] = choose(model, kind, wanted, dtype)
    return chosen
