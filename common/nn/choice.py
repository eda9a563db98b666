"""Choice of an implementation for each layer of a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from common.ops.operation import AUTO, OPTION, asked_for


class Choosing(Protocol):
    """A layer with several implementations."""

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation for the device of the layer's parameters.

        Args:
            requested: name of an implementation, or ``auto``.

        Returns:
            The name of the chosen implementation.

        Raises:
            UnsupportedImplementation: see :meth:`common.ops.operation.Operation.select`.
        """
        ...


def choose(model: nn.Module, kind: type[Choosing], requested: str, dtype: torch.dtype) -> str:
    """Choose the implementation of every layer of one class. Call this when the model is on its device.

    Args:
        requested: name of an implementation, or ``auto``.

    Returns:
        The names of the chosen implementations, joined by ``+`` where layers differ; empty without such layers.

    Raises:
        UnsupportedImplementation: see :meth:`common.ops.operation.Operation.select`.
    """
    layers: list[Choosing] = [module for module in model.modules() if isinstance(module, kind)]
    return "+".join(sorted({layer.choose(requested, dtype) for layer in layers}))


def choose_layers(
    model: nn.Module, kinds: Mapping[str, type[Choosing]], requested: Mapping[str, str], dtype: torch.dtype
) -> dict[str, str]:
    """Choose the implementations of layers of several classes; see :func:`choose`.

    Args:
        kinds: maps the name of an operation to the class of the layers that run it.
        requested: ``model.implementations``. Operations that are not in it get ``auto``.

    Returns:
        The names of the chosen implementations by operation.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """
    chosen = {}
    for name, kind in kinds.items():
        wanted = requested.get(name, AUTO)
        with asked_for(f"{OPTION}.{name}", wanted):
            chosen[name] = choose(model, kind, wanted, dtype)
    return chosen
