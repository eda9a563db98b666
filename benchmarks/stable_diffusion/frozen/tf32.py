"""The precision in which frozen networks of fp32 multiply on a GPU.

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
    """Products of fp32 matrices with the mantissa of TF32, fp16's, which PyTorch gives convolutions by default."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def attention(q_NHSD: Tensor, k_NHSD: Tensor, v_NHSD: Tensor, causal: bool) -> Tensor:
    """``softmax(q k^T / sqrt(D)) v``, each token of those before it alone if it is ``causal``.

    PyTorch's attention in fp32 takes three eighths of a ViT-H's time. Where products may have TF32's mantissa, those of
    attention take fp16's operands, whose mantissa is the same, and sum in fp32 as well.
    """
    if q_NHSD.dtype == torch.float32 and q_NHSD.is_cuda and torch.get_float32_matmul_precision() != "highest":
        half = F.scaled_dot_product_attention(q_NHSD.half(), k_NHSD.half(), v_NHSD.half(), is_causal=causal)
        return half.float()
    return F.scaled_dot_product_attention(q_NHSD, k_NHSD, v_NHSD, is_causal=causal)
