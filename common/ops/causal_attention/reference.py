"""The reference of :mod:`common.ops.causal_attention`, in chunks of queries.

Shapes: B rows, Sq queries and Sk keys per row, H query heads, K key and value heads, D head size; G = H / K query heads
share a key head. ``q_BQHD`` is (B, Sq, H, D); ``k_BSKD`` and ``v_BSKD`` are (B, Sk, K, D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.ops.triton_support import widen

MOST_SCORES = 1 << 26
"""Largest number of scores of a chunk of queries (256 MiB in fp32). A chunk has at least one query."""


class Saved(NamedTuple):
    """Input of the backward pass. Callers may drop tensors with ``_replace`` and restore them before backward.

    Attributes:
        q, k, v: inputs of the forward pass.
        o: context, (B, Sq, H, D).
        lse: log-sum-exp of the scores of each query, (B, H, Sq), fp32, or fp64 for fp64 inputs.
        scale: factor on the scores.
        state: small values that a library needs in backward.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    scale: float
    state: Any = None


DROPPED: dict[str, Any] = dict.fromkeys(("q", "k", "v", "o"))
"""Replacements that drop q, k, v and o: ``saved._replace(**DROPPED)``. The caller restores them before backward."""


class CausalAttention(NamedTuple):
    """The functions of an implementation.

    See :func:`forward_reference`, :func:`backward_reference` and :func:`backward_into_reference`.
    """

    forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Saved]]
    backward: Callable[[Tensor, Saved], tuple[Tensor, Tensor, Tensor]]
    backward_into: Callable[[Tensor, Saved, tuple[Tensor, Tensor, Tensor]], None]


@torch.no_grad()
def forward_reference(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float) -> tuple[Tensor, Saved]:
    """Compute causal attention.

    Args:
        q_BQHD: queries at the last Sq positions of the keys.
        k_BSKD, v_BSKD: keys and values; K divides H, and Sk is at least Sq.
        scale: factor on the scores.

    Returns:
        The context (B, Sq, H, D), dtype of ``q_BQHD``, and the input of the backward pass.

    Raises:
        ValueError: the shapes are inconsistent.
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
    """Return the gradients of q, k and v in their dtypes, given that of the context.

    With probabilities P and dP = do v^T: dS = P (dP - sum(do o)), dq = scale dS k, dk = scale dS^T q, dv = P^T do
    (Dao et al., arXiv:2205.14135, appendix B.4).
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
    """Write the results of :func:`backward_reference` into given tensors.

    Some implementations let their library write there, others copy.

    Args:
        gradients: targets for q, k and v with their shapes and dtypes; any strides, but 1 for the last dimension.
    """
    copy_into(gradients, backward_reference(do_BQHD, saved))


def copy_into(gradients: tuple[Tensor, Tensor, Tensor], found: tuple[Tensor, Tensor, Tensor]) -> None:
    """Copy the tensors of ``found`` into those of ``gradients``."""
    for target, source in zip(gradients, found, strict=True):
        target.copy_(source)


def check(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> None:
    """Check the shapes of queries, keys and values.

    Raises:
        ValueError: K does not divide H, the shapes of keys and values differ, or there are more queries than keys.
    """
    if k_BSKD.shape != v_BSKD.shape or q_BQHD.shape[2] % k_BSKD.shape[2] or q_BQHD.shape[1] > k_BSKD.shape[1]:
        q, k, v = (tuple(x.shape) for x in (q_BQHD, k_BSKD, v_BSKD))
        raise ValueError(f"causal attention of queries {q}, keys {k} and values {v}, (rows, length, heads, size) each")


def _chunks(q_BQHD: Tensor, k_BSKD: Tensor) -> Iterator[tuple[slice, int]]:
    """Yield the queries of each chunk, and how many keys the last of them sees."""
    rows, queries, heads, _ = q_BQHD.shape
    keys = k_BSKD.shape[1]
    size = max(1, MOST_SCORES // max(1, rows * heads * keys))
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        yield slice(start, stop), keys - queries + stop


def _grouped(x_BQHD: Tensor, K: int) -> Tensor:
    return widen(x_BQHD).unflatten(2, (K, -1))


def _scores(q_BQHD: Tensor, k_BSKD: Tensor, scale: float) -> Tensor:
    """Return the scores (B, K, G, Q, S) of queries at the last positions of the keys; -inf for later keys."""
    scores = torch.einsum("bqkgd,bskd->bkgqs", _grouped(q_BQHD, k_BSKD.shape[2]), widen(k_BSKD)) * scale
    queries, keys = scores.shape[-2:]
    hidden_QS = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    return scores.masked_fill(hidden_QS, float("-inf"))
