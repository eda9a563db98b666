"""Attention of queries to more keys than there are queries, through libraries.

Where a library knows the mask of a square only, the last Sq keys, those of the queries themselves, take it, and those
before take none. Each part gives
its context and its log-sum-exp, from which those of all keys follow. Backward of a part with the context and the
log-sum-exp of all keys gives its share of the gradients: probabilities are ``exp(score - lse)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from common.ops.causal_attention.reference import CausalAttention, Saved, check, copy_into
from common.ops.triton_support import widen

__all__ = ["Library", "Saved", "merge", "through"]


class Forward(Protocol):
    """Attention of (B, Sq, H, D) to (B, Sk, K, D), all keys or causally; K divides H."""

    def __call__(
        self, q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Any]:
        """Context (B, Sq, H, D), log-sum-exp (B, H, Sq) in natural units, and what backward wants back."""


class Backward(Protocol):
    """Gradients of q, k and v by the context's."""

    def __call__(self, do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """``saved`` has the keys and values of the part, and context and log-sum-exp of all keys."""


class BackwardInto(Protocol):
    """Gradients of q, k and v by the context's, written where they belong."""

    def __call__(self, do_BQHD: Tensor, saved: Saved, causal: bool, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
        """``gradients`` have the shapes of q, k and v, any strides but 1 of the last dimension, and get them."""


class Library(NamedTuple):
    """A library's pair.

    Attributes:
        forward, backward: functions.
        prefixes: its causal mask lets query i of Sq see keys 0 ... Sk - Sq + i; otherwise Sk is Sq where it is causal.
        into: backward into memory that is given, where the library can.
    """

    forward: Forward
    backward: Backward
    prefixes: bool = False
    into: BackwardInto | None = None


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Context and log-sum-exp over several sets of keys.

    Args:
        parts: of each set of keys, context (B, S, H, D) and log-sum-exp (B, H, S); -inf where a query sees none of
            them, whose context then counts nothing unless it isn't finite.

    Returns:
        The same of all keys, in the dtype of the first part's.
    """
    lses = torch.stack([widen(lse_BHS) for _, lse_BHS in parts])
    total_BHS = lses.logsumexp(0)
    # where a query sees no key at all every share is 0, and not exp(-inf + inf)
    shares = (lses - total_BHS.masked_fill(total_BHS == float("-inf"), 0.0)).exp()
    o_BSHD = sum(
        widen(o) * share.transpose(1, 2).unsqueeze(-1) for (o, _), share in zip(parts, shares.unbind(), strict=True)
    )
    assert isinstance(o_BSHD, Tensor)
    return o_BSHD.to(parts[0][0].dtype), total_BHS.to(parts[0][1].dtype)


def through(library: Library) -> CausalAttention:
    """The functions of an implementation, by a library's."""

    def keys_before(q_BQHD: Tensor, k_BSKD: Tensor) -> int:
        """Those that the library's causal mask leaves out."""
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
