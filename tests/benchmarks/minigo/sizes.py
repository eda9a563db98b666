"""Sizes of networks, settings of searches and random positions for the tests of MiniGo."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.minigo.features import PLANES
from benchmarks.minigo.model import MiniGo, MiniGoArchitecture
from benchmarks.minigo.search import SearchSettings

LARGE = MiniGoArchitecture(board=19, blocks=6, width=64, value_hidden=64)
SMALL = MiniGoArchitecture(board=5, blocks=2, width=16, value_hidden=16)


def search_settings(**changes: Any) -> SearchSettings:
    """Return the settings of a small search on a 5x5 board, with ``changes``."""
    settings: dict[str, Any] = {
        "board": 5,
        "komi": 7.5,
        "readouts": 40,
        "fast_readouts": 12,
        "fast_probability": 0.75,
        "virtual_losses": 4,
        "noise_alpha": 0.03,
        "noise_mix": 0.3,
        "value_init_penalty": 0.2,
        "visit_exponent": 0.98,
        "soft_pick": True,
        "resign_low": -1.0,
        "resign_high": -0.9,
        "resign_disabled": 0.0,
        "holdout": 0.0,
        "target_pruning": True,
        "restrict_after": 4,
        "allow_pass": True,
    }
    return SearchSettings(**(settings | changes))


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
