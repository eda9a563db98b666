"""Attention with more keys than queries, by calls of a library.

If a library supports a causal mask only for Sq = Sk, it is called twice: for the last Sq keys with the mask, and for
the earlier keys without. The contexts merge by their log-sum-exp. In backward, each call gets the context and the
log-sum-exp of all keys and returns its part of the gradients, because probabilities are ``exp(score - lse)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from common.ops.causal_attention.reference import CausalAttention, Saved, check, copy_into
from common.ops.triton_support import widen

__all__ = ["Library", "Saved", "merge", "through"]


class ForwardCall(Protocol):
    """Attention of queries (B, Sq, H, D) to keys (B, Sk, K, D), with or without a causal mask. K divides H."""

    def __call__(
        self, q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Any]:
        """Return context (B, Sq, H, D), natural log-sum-exp (B, H, Sq), and the state that backward needs."""


class BackwardCall(Protocol):
    """Gradients of q, k and v, given that of the context."""

    def __call__(self, do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients for the keys in ``saved``, whose context and log-sum-exp may include more keys."""


class BackwardIntoCall(Protocol):
    """Like :class:`BackwardCall`, but writes the gradients into given tensors."""

    def __call__(self, do_BQHD: Tensor, saved: Saved, causal: bool, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
        """Write to ``gradients``: shapes of q, k and v, any strides, but 1 for the last dimension."""


class Library(NamedTuple):
    """The functions of a library.

    Attributes:
        prefixes: whether its causal mask lets query i of Sq see keys 0 ... Sk - Sq + i. Otherwise causal calls need
            Sk = Sq.
        into: backward function that writes into given tensors, or None if the library has none.
    """

    forward: ForwardCall
    backward: BackwardCall
    prefixes: bool = False
    into: BackwardIntoCall | None = None


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge the attention to several sets of keys.

    Args:
        parts: context (B, S, H, D) and log-sum-exp (B, H, S) of each set of keys. The log-sum-exp is -inf where a query
            sees no key of the set; the context there must be finite and is ignored.

    Returns:
        Context and log-sum-exp for all keys, in the dtypes of the first part.
    """
    lses = torch.stack([widen(lse_BHS) for _, lse_BHS in parts])
    total_BHS = lses.logsumexp(0)
    # if a query sees no key at all, every share is 0 instead of exp(-inf + inf)
    shares = (lses - total_BHS.masked_fill(total_BHS == float("-inf"), 0.0)).exp()
    o_BSHD = sum(
        widen(o) * share.transpose(1, 2).unsqueeze(-1) for (o, _), share in zip(parts, shares.unbind(), strict=True)
    )
    assert isinstance(o_BSHD, Tensor)
    return o_BSHD.to(parts[0][0].dtype), total_BHS.to(parts[0][1].dtype)


def through(library: Library) -> CausalAttention:
    """Return the functions of an implementation that calls a library."""

    def keys_before(q_BQHD: Tensor, k_BSKD: Tensor) -> int:
        """Return the number of earlier keys that need a second call without a mask."""
        return 0 if library.prefixes else k_BSKD.shape[1] - q_BQHD.shape[1]

    @torch.no_grad()
    def forward(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float) -> tuple[Tensor, Saved]:
        check(q_BQHD, k_BSKD, v_BSKD)
        before = keys_before(q_BQHD, k_BSKD)
        o, lse, state = library.forward(q_BQHD, k_BSKD[:, before:], v_BSKD[:, before:], scale, True)
        states = [state]
        if before:
            earlier_o, earlier_lse, earlier_state = library.forward(
                q_BQHD, k_BSKD[:, :before], v_BSKD[:, :before], scale, False
            )
            o, lse = merge([(o, lse), (earlier_o, earlier_lse)])
            states.append(earlier_state)
        return o, Saved(q_BQHD, k_BSKD, v_BSKD, o, lse, scale, states)

    @torch.no_grad()
    def backward(do_BQHD: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = saved[:3]
        before = keys_before(q, k)
        own = saved._replace(k=k[:, before:], v=v[:, before:], state=saved.state[0])
        dq, dk, dv = library.backward(do_BQHD, own, True)
        if not before:
            return dq, dk, dv
        earlier = saved._replace(k=k[:, :before], v=v[:, :before], state=saved.state[1])
        earlier_dq, earlier_dk, earlier_dv = library.backward(do_BQHD, earlier, False)
        return dq + earlier_dq, torch.cat([earlier_dk, dk], 1), torch.cat([earlier_dv, dv], 1)

    @torch.no_grad()
    def backward_into(do_BQHD: Tensor, saved: Saved, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
        if library.into is None or keys_before(saved.q, saved.k):
            copy_into(gradients, backward(do_BQHD, saved))
            return
        library.into(do_BQHD, saved._replace(state=saved.state[0]), True, gradients)

    return CausalAttention(forward, backward, backward_into)
