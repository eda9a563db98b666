"""Causal attention of the tokens that one rank has of a row.

Each of a rank's chunks is one attention: its queries against the keys from the row's first to the chunk's last. Fewer
queries than keys stand at the end, so the causal mask is aligned at its bottom right: query i of n sees the first
m - n + i + 1 of m keys.

Shapes: B rows, S tokens of a whole row, L those of one rank, n queries and m keys of one attention, H query heads,
K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.distributed.context_parallel.split import ContextSplit

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``attend(q_BnHD, k_BmKD, v_BmKD) -> o_BnHD``, causal at the bottom right, differentiable."""


def attention(q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, split: ContextSplit, attend: Attend) -> Tensor:
    """Attention (B, L, H, D) of this rank's tokens to all before them. Collective in both passes.

    Args:
        q_BLHD, k_BLKD, v_BLKD: of this rank's tokens, in the order of ``split.positions()``.
        split: of the rows.
        attend: attention of one chunk.
    """
    k_BSKD, v_BSKD = split.gather_kv(k_BLKD, v_BLKD)
    parts = [
        attend(q_BLHD[:, own], k_BSKD[:, :stop], v_BSKD[:, :stop])
        for own, (_, stop) in zip(split.local_chunks, split.spans, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
