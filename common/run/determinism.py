"""Choice between deterministic kernels and the fastest ones."""

from __future__ import annotations

import torch


def set_determinism(deterministic: bool) -> None:
    """Select deterministic kernels in this process; with False, the fastest ones."""
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
