"""Which implementations the network runs with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.architecture import Architecture, Transformer
from common.nn.choice import Choosing, choose
from common.nn.group_norm import GroupNorm
from common.nn.layer_norm import LayerNorm
from common.nn.upsample_convolution import UpsampleConvolution
from common.ops import bias_gradient, dense_attention, geglu
from common.ops.bias_gradient import RowSums
from common.ops.dense_attention.plain import Attention
from common.ops.implementation import AUTO, Implementation, OperationRequest, asked_for, select

LAYERS: dict[str, type[Choosing]] = {
    "group_norm": GroupNorm,
    "layer_norm": LayerNorm,
    "upsampling": UpsampleConvolution,
}
"""Operation to the layers that run it."""


@dataclass(frozen=True)
class Implementations:
    """Which implementation of each operation is asked for: a name out of its ``IMPLEMENTATIONS``, or ``auto``.

    ``attention`` is that of the places to each other, ``cross_attention`` that to the tokens of the caption,
    ``bias_gradient`` sums the gradients at the ends of blocks over places, and ``upsampling`` comes with its
    convolution. The autoencoder takes ``group_norm`` and ``upsampling`` from here, too.
    """

    group_norm: str = AUTO
    layer_norm: str = AUTO
    geglu: str = AUTO
    bias_gradient: str = AUTO
    attention: str = AUTO
    cross_attention: str = AUTO
    upsampling: str = AUTO


@dataclass(frozen=True)
class Operations:
    """The chosen functions; signatures in :mod:`common.ops`.

    Attributes:
        attention, cross_attention: by the number of places.
        choices: operation to the names chosen, joined by ``+`` where sizes differ in it.
    """

    geglu: Callable[[Tensor, Tensor | None], Tensor]
    row_sums: RowSums
    attention: dict[int, Attention]
    cross_attention: dict[int, Attention]
    choices: dict[str, str] = field(default_factory=dict)


def choose_operations(
    requested: Implementations, architecture: Architecture, device: torch.device, dtype: torch.dtype
) -> Operations:
    """The functions of the transformers; see :func:`choose_layers` for layers of :mod:`common.nn`.

    Raises:
        UnsupportedImplementation: see :func:`common.ops.implementation.select`.
    """
    layers = [layer for layer in architecture.layers() if isinstance(layer, Transformer)]
    places = sorted({(architecture.latent_size // layer.factor) ** 2 for layer in layers})
    choices: dict[str, str] = {}

    def chosen(name: str, module: Any, each: list[dict[str, int]]) -> list[Any]:
        wanted = getattr(requested, name)
        with asked_for(f"model.{name}", wanted):
            found: list[Implementation] = [
                select(module.IMPLEMENTATIONS, wanted, OperationRequest(device, dtype, sizes)) for sizes in each
            ]
        choices[name] = "+".join(sorted({implementation.name for implementation in found}))
        return [implementation.function for implementation in found]

    def attentions(name: str, keys: int | None) -> dict[int, Attention]:
        sizes = [
            {"head_size": architecture.head_channels, "queries": count, "keys": count if keys is None else keys}
            for count in places
        ]
        return dict(zip(places, chosen(name, dense_attention, sizes), strict=True))

    return Operations(
        geglu=chosen("geglu", geglu, [{}])[0],
        row_sums=chosen("bias_gradient", bias_gradient, [{}])[0],
        attention=attentions("attention", None),
        cross_attention=attentions("cross_attention", architecture.context_length),
        choices=choices,
    )


def choose_layers(network: nn.Module, requested: Implementations, dtype: torch.dtype) -> dict[str, str]:
    """Choose how the layers of :data:`LAYERS` in a network run, once it is on its device.

    Args:
        network: the U-Net, or a frozen network.
        requested: of each operation.
        dtype: of the activations.

    Returns:
        Operation to the names chosen, joined by ``+`` where layers differ; nothing for layers that it doesn't have.

    Raises:
        UnsupportedImplementation: see :func:`common.ops.implementation.select`.
    """
    choices = {}
    for name, kind in LAYERS.items():
        wanted = getattr(requested, name)
        with asked_for(f"model.{name}", wanted):
            choices[name] = choose(network, kind, wanted, dtype)
    return {name: chosen for name, chosen in choices.items() if chosen}
