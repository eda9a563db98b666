"""TF32, the format with the mantissa of fp16 in which GPUs can multiply fp32 matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Use TF32 for fp32 matrix products in the block, even if it fails; then restore the setting.

    PyTorch uses TF32 for convolutions by default.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
