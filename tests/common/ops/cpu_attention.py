"""Attention by PyTorch on a CPU, instead of a library's: full, or causal with as many keys as queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.causal_attention.reference import Saved


def on_cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, Any]:
    assert not causal or q.shape[1] == k.shape[1]
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return o.transpose(1, 2), lse, "causal" if causal else "all"


def on_cpu_backward(do: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    assert saved.state == ("causal" if causal else "all")
    assert do.is_contiguous()
    assert saved.o.is_contiguous()
    kv_heads, group = saved.k.shape[2], saved.q.shape[2] // saved.k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (saved.k, saved.v))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in (do, saved.q, k, v, saved.o)), saved.lse, 0.0, causal, scale=saved.scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk.unflatten(2, (kv_heads, group)).sum(3), dv.unflatten(2, (kv_heads, group)).sum(3)
