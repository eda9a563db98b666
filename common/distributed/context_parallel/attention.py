"""Causal attention for the tokens of a row that one rank holds.

Each chunk of a rank needs one attention call: its queries attend to the keys from the start of the row to the end of
the chunk. The n queries are the last n of the m positions, so the causal mask is aligned at its bottom right: query i
sees the first m - n + i + 1 keys.

Shapes: B rows, S tokens of a whole row, L tokens per row on one rank, n queries and m keys of one attention call,
H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.distributed.context_parallel.split import ContextSplit

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``attend(q_BnHD, k_BmKD, v_BmKD) -> o_BnHD``: differentiable causal attention, aligned at the bottom right."""


def attention(q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, split: ContextSplit, attend: Attend) -> Tensor:
    """Return the attention output (B, L, H, D) of this rank's tokens. Forward and backward are collective.

    Args:
        q_BLHD, k_BLKD, v_BLKD: this rank's tokens, in the order of ``split.positions()``.
        attend: function that computes the attention of one chunk.
    """
    k_BSKD, v_BSKD = split.gather_kv(k_BLKD, v_BLKD)
    parts = [
        attend(q_BLHD[:, own], k_BSKD[:, :stop], v_BSKD[:, :stop])
        for own, (_, stop) in zip(split.local_chunks, split.spans, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
