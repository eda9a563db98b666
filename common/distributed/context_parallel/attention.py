"""Causal attention of the tokens that one rank has of a row.

Each of a rank's chunks is one attention: its queries against the keys from the row's first to the chunk's last. Fewer
queries than keys stand at the end, so the causal mask is aligned at its bottom right: query i of n sees the first
m - n + i + 1 of m keys.

Libraries that know square masks only do it in two: earlier keys without a mask, the chunk's own with one. The two parts
merge by the logarithms of their sums of exponentials (Dao et al. 2022, section 3.1). For the backward pass a part needs
nothing but the *merged* result and logarithm: with these its probabilities are those of the whole.

Shapes: B rows, S tokens of a whole row, L those of one rank, n queries and m keys of one attention, H query heads,
K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.distributed.context_parallel.split import ContextSplit

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``attend(q_BnHD, k_BmKD, v_BmKD) -> o_BnHD``, causal at the bottom right, differentiable."""

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]
"""``forward(q_BnHD, k_BmKD, v_BmKD) -> o_BnHD, saved``, causal at the bottom right; without autograd."""

Backward = Callable[[Tensor, Any], tuple[Tensor, Tensor, Tensor]]
"""``backward(do_BnHD, saved) -> dq_BnHD, dk_BmKD, dv_BmKD``."""


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


def attention_forward(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, split: ContextSplit, forward: Forward
) -> tuple[Tensor, list[Any]]:
    """:func:`attention` without autograd; what it returns second is for :func:`attention_backward`. Collective."""
    k_BSKD, v_BSKD = split.all_gather_kv(k_BLKD, v_BLKD)
    parts, saved = [], []
    for own, (_, stop) in zip(split.local_chunks, split.spans, strict=True):
        part, kept = forward(q_BLHD[:, own], k_BSKD[:, :stop], v_BSKD[:, :stop])
        parts.append(part)
        saved.append(kept)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1), saved


def attention_backward(
    do_BLHD: Tensor, saved: Sequence[Any], split: ContextSplit, backward: Backward
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's queries, keys and values. Collective."""
    pieces = [backward(do_BLHD[:, own], kept) for own, kept in zip(split.local_chunks, saved, strict=True)]
    if split.ranks == 1:
        return pieces[0]
    dq_BLHD = torch.cat([dq for dq, _, _ in pieces], 1)
    dk_BSKD, dv_BSKD = (sum_of_prefixes([piece[which] for piece in pieces], split.row_length) for which in (1, 2))
    return dq_BLHD, *split.reduce_scatter_kv(dk_BSKD, dv_BSKD)


def sum_of_prefixes(gradients: Sequence[Tensor], length: int) -> Tensor:
    """The sum of gradients (B, m, K, D) that each concern the first m keys of a row."""
    B, _, K, D = gradients[0].shape
    total_BSKD = gradients[0].new_zeros(B, length, K, D)
    for gradient in gradients:
        total_BSKD[:, : gradient.shape[1]] += gradient
    return total_BSKD


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention to several sets of keys from the attention to each of them; differentiable.

    Args:
        parts: per set the result (B, n, H, D) and the logarithm of the sum of exponentials of its logits (B, H, n).

    Returns:
        The same two of all keys together; the result in its dtype, the logarithm in fp32 or wider.
    """
    lses_PBHn = torch.stack([lse for _, lse in parts])
    lses_PBHn = lses_PBHn.to(torch.promote_types(lses_PBHn.dtype, torch.float32))
    lse_BHn = lses_PBHn.logsumexp(0)
    shares_PBnH1 = (lses_PBHn - lse_BHn).exp().transpose(2, 3).unsqueeze(-1)
    o_BnHD = sum(share * o for share, (o, _) in zip(shares_PBnH1, parts, strict=True))
    assert isinstance(o_BnHD, Tensor)  # there is a part
    return o_BnHD.to(parts[0][0].dtype), lse_BHn


class SquareAttention(NamedTuple):
    """A library's attention, without autograd: n = m where ``causal`` is true, any two otherwise.

    Attributes:
        forward: ``(q_BnHD, k_BmKD, v_BmKD, causal) -> o_BnHD, lse_BHn``.
        backward: ``(do_BnHD, q_BnHD, k_BmKD, v_BmKD, o_BnHD, lse_BHn, causal) -> dq_BnHD, dk_BmKD, dv_BmKD``, which
            takes probabilities from ``lse`` and the rows' sums of do * o from ``o``.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


class BottomRightAttention:
    """Causal attention with at least as many keys as queries, out of square parts.

    ``forward`` and ``backward`` fit :func:`attention_forward` and :func:`attention_backward`, calling it
    :func:`attention`.

    Args:
        square: a library's attention.
    """

    def __init__(self, square: SquareAttention) -> None:
        self._square = square

    def __call__(self, q_BnHD: Tensor, k_BmKD: Tensor, v_BmKD: Tensor) -> Tensor:
        """Differentiable attention (B, n, H, D)."""
        o_BnHD: Tensor = _BottomRight.apply(q_BnHD, k_BmKD, v_BmKD, self)
        return o_BnHD

    def forward(self, q_BnHD: Tensor, k_BmKD: Tensor, v_BmKD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Result and what :meth:`backward` needs."""
        earlier = k_BmKD.shape[1] - q_BnHD.shape[1]
        parts = [self._square.forward(q_BnHD, k_BmKD[:, earlier:], v_BmKD[:, earlier:], True)]
        if earlier:
            parts.append(self._square.forward(q_BnHD, k_BmKD[:, :earlier], v_BmKD[:, :earlier], False))
        o_BnHD, lse_BHn = merge(parts) if earlier else parts[0]
        return o_BnHD, (q_BnHD, k_BmKD, v_BmKD, o_BnHD, lse_BHn)

    def backward(self, do_BnHD: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        q_BnHD, k_BmKD, v_BmKD, o_BnHD, lse_BHn = saved
        earlier = k_BmKD.shape[1] - q_BnHD.shape[1]

        def part(keys: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            return self._square.backward(do_BnHD, q_BnHD, k_BmKD[:, keys], v_BmKD[:, keys], o_BnHD, lse_BHn, causal)

        dq_BnHD, dk_BnKD, dv_BnKD = part(slice(earlier, None), True)
        if not earlier:
            return dq_BnHD, dk_BnKD, dv_BnKD
        more_BnHD, dk_BeKD, dv_BeKD = part(slice(earlier), False)
        return dq_BnHD + more_BnHD, torch.cat((dk_BeKD, dk_BnKD), 1), torch.cat((dv_BeKD, dv_BnKD), 1)


class _BottomRight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BnHD: Tensor, k_BmKD: Tensor, v_BmKD: Tensor, attend: BottomRightAttention) -> Tensor:
        ctx.attend = attend
        o_BnHD, saved = attend.forward(q_BnHD, k_BmKD, v_BmKD)
        ctx.save_for_backward(*saved)
        return o_BnHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BnHD: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.attend.backward(do_BnHD, ctx.saved_tensors), None
