"""What all frozen networks have in common."""

from __future__ import annotations

from torch import nn

from common.nn.frozen import mark_frozen


def freeze(network: nn.Module) -> None:
    """Put ``network`` into evaluation, for good: no gradients, no share in checkpoints and transfers."""
    network.eval()
    names = [*(name for name, _ in network.named_parameters()), *(name for name, _ in network.named_buffers())]
    mark_frozen(network, names)
