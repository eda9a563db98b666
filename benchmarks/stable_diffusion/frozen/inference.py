"""Freezing of networks that are not trained."""

from __future__ import annotations

from torch import nn

from common.nn.frozen import mark_frozen


def freeze(network: nn.Module) -> None:
    """Put ``network`` permanently into evaluation mode: no gradients, and excluded from checkpoints and transfers."""
    network.eval()
    names = [*(name for name, _ in network.named_parameters()), *(name for name, _ in network.named_buffers())]
    mark_frozen(network, names)
