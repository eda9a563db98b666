"""Gated attention within the rows of an alignment or of a pair matrix, with a bias that all rows share.

``sigmoid(g + gate_bias) * softmax(q k^T / sqrt(C) + (mask - 1) 1e9 + bias) v`` for every row and head: the row, column
and triangle attention of AlphaFold2 (Jumper et al. 2021, supplementary algorithms 7, 8, 13 and 14), without the
projections before and after it. Queries, keys, values and gates are one tensor, the result of one matrix product.

Rows and positions may be transposed: the result has the same order in memory as the input. Attention along the columns
therefore needs no copy.

Shapes: B samples, S rows of a sample, N positions in a row, H heads, C channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen

MASKED = 1e9
"""Number that is subtracted from the logits of masked keys."""


def pair_bias_attention_reference(
    qkvg_BSN4HC: Tensor, gate_bias_HC: Tensor, mask_BSN: Tensor, bias_BHNN: Tensor | None
) -> Tensor:
    """Return the gated context (B, S, N, H, C) in the order of the input: contiguous after the same transposition.

    Args:
        qkvg_BSN4HC: queries, keys, values and gates before the sigmoid. Queries are not scaled.
        gate_bias_HC: added to the gates.
        mask_BSN: 1 for keys that exist, 0 for padding; any dtype.
        bias_BHNN: added to the logits of all rows of a sample, (..., query, key); None for no bias.
    """
    q_BSHNC, k_BSHNC, v_BSHNC, g_BSHNC = (widen(x).transpose(2, 3) for x in qkvg_BSN4HC.unbind(3))
    logits_BSHNN = (q_BSHNC * q_BSHNC.shape[-1] ** -0.5) @ k_BSHNC.mT
    logits_BSHNN = logits_BSHNN + ((mask_BSN.to(logits_BSHNN.dtype) - 1.0) * MASKED)[:, :, None, None, :]
    if bias_BHNN is not None:
        logits_BSHNN = logits_BSHNN + widen(bias_BHNN).unsqueeze(1)
    gate_BSHNC = torch.sigmoid(g_BSHNC + widen(gate_bias_HC).unsqueeze(1))
    context_BSNHC = (logits_BSHNN.softmax(-1) @ v_BSHNC * gate_BSHNC).transpose(2, 3).to(qkvg_BSN4HC.dtype)
    if is_transposed(qkvg_BSN4HC):
        return context_BSNHC.transpose(1, 2).contiguous().transpose(1, 2)
    return context_BSNHC.contiguous()


def is_transposed(x_BSN: Tensor) -> bool:
    """Return whether the rows of a tensor (B, S, N, ...) are closer in memory than the positions."""
    return x_BSN.stride(1) < x_BSN.stride(2)


PAIR_BIAS_ATTENTION = Operation(
    "pair_bias_attention",
    pair_bias_attention_reference,
    {
        "triton": triton_kernels(
            "benchmarks.openfold.ops.pair_bias_attention.triton:pair_bias_attention", most={"head_size": 128}
        ),
    },
    kernel_names=(("attention", r"^pair_bias_attention_"),),
    cases="benchmarks.openfold.ops.pair_bias_attention.cases",
)
"""Signature: ``pair_bias_attention(qkvg_BSN4HC, gate_bias_HC, mask_BSN, bias_BHNN)``. Size of a request:
``head_size``."""
