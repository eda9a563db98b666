"""The reference of :mod:`common.ops.causal_attention`, in chunks of queries.

Shapes: B rows, Sq queries and Sk keys of each, H query heads, K key and value heads, D their size; G = H / K queries
share a key. q (B, Sq, H, D) is ``q_BQHD``, k and v (B, Sk, K, D) ``k_BSKD``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.ops.triton_support import widen

MOST_SCORES = 1 << 26
"""Scores that a chunk of queries has at most, unless one query has more: 256 MiB in fp32."""


class Saved(NamedTuple):
    """What backward takes. q, k and v may be dropped and put back with ``_replace``.

    Attributes:
        q, k, v: as forward took them.
        o: the result, (B, Sq, H, D).
        lse: logarithm of the sum of exponentials of each query's scores, (B, H, Sq), fp32, or fp64 of fp64.
        scale: of the scores.
        state: what a library wants back, small.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    scale: float
    state: Any = None


DROPPED: dict[str, Any] = dict.fromkeys(("q", "k", "v", "o"))
"""``saved._replace(**DROPPED)`` keeps none of what a caller has anyway, and gives again for the backward pass."""


class CausalAttention(NamedTuple):
    """The functions of an implementation.

    See :func:`forward_reference`, :func:`backward_reference` and :func:`backward_into_reference`.
    """

    forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Saved]]
    backward: Callable[[Tensor, Saved], tuple[Tensor, Tensor, Tensor]]
    backward_into: Callable[[Tensor, Saved, tuple[Tensor, Tensor, Tensor]], None]


@torch.no_grad()
def forward_reference(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float) -> tuple[Tensor, Saved]:
    """Reference implementation.

    Args:
        q_BQHD: queries, those of the last Sq positions of the keys.
        k_BSKD, v_BSKD: keys and values; K divides H, and Sk is at least Sq.
        scale: of the scores.

    Returns:
        The context (B, Sq, H, D), dtype of ``q_BQHD``, and what backward takes.

    Raises:
        ValueError: the shapes don't fit.
    """
    check(q_BQHD, k_BSKD, v_BSKD)
    o_BQHD = torch.empty_like(q_BQHD, memory_format=torch.contiguous_format)
    lse_BHQ = widen(q_BQHD).new_empty((q_BQHD.shape[0], q_BQHD.shape[2], q_BQHD.shape[1]))
    for rows, seen in _chunks(q_BQHD, k_BSKD):
        scores_BKGQS = _scores(q_BQHD[:, rows], k_BSKD[:, :seen], scale)
        lse_BHQ[:, :, rows] = scores_BKGQS.logsumexp(-1).flatten(1, 2)
        o = torch.einsum("bkgqs,bskd->bqkgd", scores_BKGQS.softmax(-1), widen(v_BSKD[:, :seen]))
        o_BQHD[:, rows] = o.flatten(2, 3).to(q_BQHD.dtype)
    return o_BQHD, Saved(q_BQHD, k_BSKD, v_BSKD, o_BQHD, lse_BHQ, scale)


@torch.no_grad()
def backward_reference(do_BQHD: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """Reference implementation.

    With P the probabilities and dP = do v^T: dS = P (dP - sum(do o)), dq = scale dS k, dk = scale dS^T q, dv = P^T do
    (Dao et al., arXiv:2205.14135, appendix B.4).

    Args:
        do_BQHD: gradient of the context.
        saved: of forward.

    Returns:
        Gradients of q, k and v, in their dtypes.
    """
    q_BQHD, k_BSKD, v_BSKD, o_BQHD, lse_BHQ, scale, _ = saved
    K = k_BSKD.shape[2]
    dq_BQHD = torch.empty_like(q_BQHD, memory_format=torch.contiguous_format)
    dk_BSKD, dv_BSKD = (torch.zeros_like(widen(x), memory_format=torch.contiguous_format) for x in (k_BSKD, v_BSKD))
    for rows, seen in _chunks(q_BQHD, k_BSKD):
        q, do, o = (_grouped(x[:, rows], K) for x in (q_BQHD, do_BQHD, o_BQHD))
        k, v = widen(k_BSKD[:, :seen]), widen(v_BSKD[:, :seen])
        lse_BKGQ = lse_BHQ[:, :, rows].unflatten(1, (K, -1))
        p_BKGQS = (_scores(q_BQHD[:, rows], k_BSKD[:, :seen], scale) - lse_BKGQ.unsqueeze(-1)).exp()
        dv_BSKD[:, :seen] += torch.einsum("bkgqs,bqkgd->bskd", p_BKGQS, do)
        delta_BKGQ = torch.einsum("bqkgd,bqkgd->bkgq", do, o)
        d_scores = p_BKGQS * (torch.einsum("bqkgd,bskd->bkgqs", do, v) - delta_BKGQ.unsqueeze(-1)) * scale
        dq_BQHD[:, rows] = torch.einsum("bkgqs,bskd->bqkgd", d_scores, k).flatten(2, 3).to(q_BQHD.dtype)
        dk_BSKD[:, :seen] += torch.einsum("bkgqs,bqkgd->bskd", d_scores, q)
    return dq_BQHD, dk_BSKD.to(k_BSKD.dtype), dv_BSKD.to(v_BSKD.dtype)


@torch.no_grad()
def backward_into_reference(do_BQHD: Tensor, saved: Saved, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    """The gradients of :func:`backward_reference` where they belong.

    Args:
        do_BQHD: gradient of the context.
        saved: of forward.
        gradients: of q, k and v, in their shapes and dtypes and any strides but 1 of the last dimension: get them.
            Libraries that can write there; others, and those whose parts are added up, copy.
    """
    copy_into(gradients, backward_reference(do_BQHD, saved))


def copy_into(gradients: tuple[Tensor, Tensor, Tensor], found: tuple[Tensor, Tensor, Tensor]) -> None:
    """What ``found`` has, in the memory of ``gradients``."""
    for target, source in zip(gradients, found, strict=True):
        target.copy_(source)


def check(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> None:
    """Refuse shapes that mean nothing.

    Raises:
        ValueError: heads of keys don't divide those of queries, keys and values differ, or queries outnumber keys.
    """
    if k_BSKD.shape != v_BSKD.shape or q_BQHD.shape[2] % k_BSKD.shape[2] or q_BQHD.shape[1] > k_BSKD.shape[1]:
        q, k, v = (tuple(x.shape) for x in (q_BQHD, k_BSKD, v_BSKD))
        raise ValueError(f"causal attention of queries {q}, keys {k} and values {v}, (rows, length, heads, size) each")


def _chunks(q_BQHD: Tensor, k_BSKD: Tensor) -> Iterator[tuple[slice, int]]:
    """Queries of a chunk, and how many keys the last of them sees."""
    rows, queries, heads, _ = q_BQHD.shape
    keys = k_BSKD.shape[1]
    size = max(1, MOST_SCORES // max(1, rows * heads * keys))
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        yield slice(start, stop), keys - queries + stop


def _grouped(x_BQHD: Tensor, K: int) -> Tensor:
    return widen(x_BQHD).unflatten(2, (K, -1))


def _scores(q_BQHD: Tensor, k_BSKD: Tensor, scale: float) -> Tensor:
    """Scores (B, K, G, Q, S) of queries that are the last of the keys' positions; -inf for later keys."""
    scores = torch.einsum("bqkgd,bskd->bkgqs", _grouped(q_BQHD, k_BSKD.shape[2]), widen(k_BSKD)) * scale
    queries, keys = scores.shape[-2:]
    hidden_QS = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    return scores.masked_fill(hidden_QS, float("-inf"))
