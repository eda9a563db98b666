"""Kernels that give the same bits each time, or the fastest ones."""

from __future__ import annotations

import torch


def set_determinism(deterministic: bool) -> None:
    """Choose for this process."""
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
