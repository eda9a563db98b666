"""Precision of matrix products in frozen fp32 networks on a GPU.

Shapes: N sequences, H heads, S tokens, D features of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


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


def attention(q_NHSD: Tensor, k_NHSD: Tensor, v_NHSD: Tensor, causal: bool) -> Tensor:
    """Return ``softmax(q k^T / sqrt(D)) v``; with ``causal``, a token attends only to itself and earlier tokens.

    PyTorch's fp32 attention takes three eighths of a ViT-H's time. Where TF32 is allowed, fp16 operands are used
    instead: they have the same mantissa, and sums are in fp32 as well.
    """
    if q_NHSD.dtype == torch.float32 and q_NHSD.is_cuda and torch.get_float32_matmul_precision() != "highest":
        half = F.scaled_dot_product_attention(q_NHSD.half(), k_NHSD.half(), v_NHSD.half(), is_causal=causal)
        return half.float()
    return F.scaled_dot_product_attention(q_NHSD, k_NHSD, v_NHSD, is_causal=causal)
