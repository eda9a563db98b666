"""Sizes of networks and random positions for the tests of MiniGo."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.minigo.features import PLANES
from benchmarks.minigo.model import MiniGo, MiniGoArchitecture

LARGE = MiniGoArchitecture(board=19, blocks=6, width=64, value_hidden=64)
SMALL = MiniGoArchitecture(board=5, blocks=2, width=16, value_hidden=16)


def random_planes(count: int, board: int, seed: int = 0) -> np.ndarray:
    """Return planes (count, PLANES, board, board) of random zeros and ones, uint8."""
    return np.random.default_rng(seed).integers(0, 2, (count, PLANES, board, board), dtype=np.uint8)


def packed(planes: np.ndarray) -> Tensor:
    """Return the bits of planes as the search packs them."""
    return torch.from_numpy(np.packbits(planes.reshape(len(planes), -1), axis=1))


def trained(architecture: MiniGoArchitecture, dtype: torch.dtype = torch.float64) -> MiniGo:
    """Return a network whose norms have statistics, scales and shifts that all differ."""
    generator = torch.Generator().manual_seed(1)
    model = MiniGo(architecture, generator=generator, dtype=dtype)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif tensor.ndim == 1:
                tensor.uniform_(-0.5, 0.5, generator=generator)
    return model
