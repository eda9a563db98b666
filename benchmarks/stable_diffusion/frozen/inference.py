"""Freezing and fp32 precision of networks that are not trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from common.nn.frozen import mark_frozen


def freeze(network: nn.Module) -> None:
    """Put ``network`` permanently into evaluation mode: no gradients, and excluded from checkpoints and transfers."""
    network.eval()
    names = [*(name for name, _ in network.named_parameters()), *(name for name, _ in network.named_buffers())]
    mark_frozen(network, names)


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Use TF32 for fp32 matrix products in the block, even if it fails; then restore the setting.

    PyTorch uses TF32 for convolutions by default. TF32 has the mantissa of fp16.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
