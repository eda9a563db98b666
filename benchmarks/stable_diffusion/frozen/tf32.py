"""The precision in which frozen networks of fp32 multiply on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Products of fp32 matrices with the mantissa of TF32, fp16's, which PyTorch gives convolutions by default."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
