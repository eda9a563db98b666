"""Choice of the implementations of operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.unet_architecture import Transformer, UNetArchitecture
from common.nn import choice
from common.nn.convolution import UpsampleConvolution
from common.nn.group_norm import GroupNorm, LayerNorm
from common.ops.add_layer_norm import ADD_LAYER_NORM
from common.ops.bias_gradient import BIAS_GRADIENT, RowSums
from common.ops.dense_attention import DENSE_ATTENTION, Attention
from common.ops.geglu import GEGLU
from common.ops.group_norm import GROUP_NORM
from common.ops.operation import Operation, OperationRequest, select
from common.ops.upsample_convolution import UPSAMPLE_CONVOLUTION

OPERATIONS: dict[str, Operation] = {
    "group_norm": GROUP_NORM,
    "layer_norm": ADD_LAYER_NORM,
    "geglu": GEGLU,
    "bias_gradient": BIAS_GRADIENT,
    "attention": DENSE_ATTENTION,
    "cross_attention": DENSE_ATTENTION,
    "upsampling": UPSAMPLE_CONVOLUTION,
}
"""Operations that ``model.implementations`` can choose an implementation of.

``attention`` is self-attention between the positions of a picture, ``cross_attention`` attends to the tokens of the
caption, ``bias_gradient`` sums the gradients at the ends of blocks over positions, and ``upsampling`` includes the
convolution that follows. The autoencoder uses ``group_norm`` and ``upsampling``, too.
"""

LAYERS: dict[str, type[choice.Choosing]] = {
    "group_norm": GroupNorm,
    "layer_norm": LayerNorm,
    "upsampling": UpsampleConvolution,
}
"""Layer classes by the operation that they run."""


@dataclass(frozen=True)
class Operations:
    """The chosen functions of the transformers and of the ends of blocks.

    Attributes:
        attention, cross_attention: functions by the number of spatial positions.
        choices: names of the chosen implementations by operation, joined by ``+`` where they depend on the size.
    """

    geglu: Callable[[Tensor, Tensor | None], Tensor]
    row_sums: RowSums
    attention: dict[int, Attention]
    cross_attention: dict[int, Attention]
    choices: dict[str, str] = field(default_factory=dict)


def choose_operations(
    requested: Mapping[str, str], architecture: UNetArchitecture, device: torch.device, dtype: torch.dtype
) -> Operations:
    """Choose all operations except those of :data:`LAYERS`.

    Args:
        requested: ``model.implementations``.

    Raises:
        UnsupportedImplementation: names ``model.implementations.<operation>``.
    """
    layers = [layer for layer in architecture.layers() if isinstance(layer, Transformer)]
    positions = sorted({(architecture.latent_size // layer.factor) ** 2 for layer in layers})
    choices: dict[str, str] = {}

    def chosen(name: str, several_sizes: list[dict[str, int]]) -> list[Any]:
        requests = [OperationRequest(device, dtype, sizes) for sizes in several_sizes]
        found = [select(requested, name, OPERATIONS[name], request) for request in requests]
        choices[name] = "+".join(sorted({each.name for each in found}))
        return [each.function for each in found]

    def attentions(name: str, keys: int | None) -> dict[int, Attention]:
        sizes = [
            {"head_size": architecture.head_channels, "queries": count, "keys": count if keys is None else keys}
            for count in positions
        ]
        return dict(zip(positions, chosen(name, sizes), strict=True))

    return Operations(
        geglu=chosen("geglu", [{}])[0],
        row_sums=chosen("bias_gradient", [{}])[0],
        attention=attentions("attention", None),
        cross_attention=attentions("cross_attention", architecture.context_length),
        choices=choices,
    )


def choose_layers(network: nn.Module, requested: Mapping[str, str], dtype: torch.dtype) -> dict[str, str]:
    """Choose the implementations of the layers of :data:`LAYERS` in a network that is already on its device.

    Args:
        network: the U-Net, or a frozen network.
        requested: ``model.implementations``.

    Returns:
        Names of the chosen implementations by operation, joined by ``+`` where layers differ. Operations that the
            network does not use are left out.

    Raises:
        UnsupportedImplementation: names ``model.implementations.<operation>``.
    """
    choices = choice.choose_layers(network, LAYERS, requested, dtype)
    return {name: chosen for name, chosen in choices.items() if chosen}
