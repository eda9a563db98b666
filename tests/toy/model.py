"""The network. B volumes, V voxels of each, P parameters to estimate."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class VolumeRegression(nn.Module):
    """Two layers on the voxels; the parameters are in [-1, 1].

    Args:
        voxels: V.
        width: width of the hidden layer.
        parameters: P.
        generator: draws the initial weights, equal on all ranks.
    """

    def __init__(self, voxels: int, width: int, parameters: int, generator: torch.Generator) -> None:
        super().__init__()
        self.hidden = nn.Linear(voxels, width)
        self.output = nn.Linear(width, parameters)
        for layer in (self.hidden, self.output):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, volume_BV: Tensor) -> Tensor:
        """Return estimates (B, P)."""
        return self.output(nn.functional.leaky_relu(self.hidden(volume_BV), 0.3))
