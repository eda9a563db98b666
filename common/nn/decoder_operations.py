"""The operations of a decoder's halves, chosen by name, and attention that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from common.distributed.context_parallel.split import ContextSplit
from common.nn.decoder import DecoderArchitecture
from common.ops import causal_attention, rms_norm, rope, swiglu
from common.ops.causal_attention.plain import DROPPED, CausalAttention, Saved
from common.ops.implementation import Implementation, OperationRequest, asked_for, select

DECODER_OPERATIONS: dict[str, Mapping[str, Implementation]] = {
    "attention": causal_attention.IMPLEMENTATIONS,
    "rms_norm": rms_norm.IMPLEMENTATIONS,
    "rope": rope.IMPLEMENTATIONS,
    "swiglu": swiglu.IMPLEMENTATIONS,
}
"""What every decoder chooses."""


class Attending(NamedTuple):
    """Attention with its backward pass.

    Attributes:
        gather: ``(k, v)`` of whole rows from this rank's.
        forward: ``(q, k, v) -> o, kept``: (B, S, heads, D), and something small for the backward pass.
        backward: ``(do, q, k, v, o, kept) -> dq, wait``, and ``wait() -> dk, dv``, of this rank's tokens again, which
            other ranks have their part in.
    """

    gather: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]]


@dataclass(frozen=True)
class DecoderOperations:
    """The chosen implementations of what every decoder chooses; signatures in :mod:`common.ops`."""

    rms_norm: Any
    rope: Any
    swiglu: Any
    attention: Attending


class Requested(Protocol):
    """Names of implementations, or ``auto``."""

    @property
    def attention(self) -> str: ...
    @property
    def rms_norm(self) -> str: ...
    @property
    def rope(self) -> str: ...
    @property
    def swiglu(self) -> str: ...


def choose_operations(
    operations: Mapping[str, Mapping[str, Implementation]],
    requested: Requested,
    architecture: DecoderArchitecture,
    split: ContextSplit,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The functions of each operation by its name, those of ``attention`` as :class:`Attending`, and the names chosen.

    Args:
        operations: name to implementations; ``attention`` is among them.
        requested: has by each operation's name that of an implementation, or ``auto``.
        architecture: sizes.
        split: of the rows over the ranks of cp.
        device, dtype: of activations.

    Raises:
        UnsupportedImplementation: naming ``model.<operation>``.
    """
    sizes = {"features": architecture.hidden, "head_size": architecture.head_size}
    request = OperationRequest(device, dtype, sizes)
    chosen = {}
    for name, implementations in operations.items():
        wanted = getattr(requested, name)
        with asked_for(f"model.{name}", wanted):
            chosen[name] = select(implementations, wanted, request)
    functions = {name: implementation.function for name, implementation in chosen.items()}
    functions["attention"] = attending(functions["attention"], architecture.head_size**-0.5, split)
    return functions, {name: implementation.name for name, implementation in chosen.items()}


def attending(attention: CausalAttention, scale: float, split: ContextSplit) -> Attending:
    """Attention of this rank's queries to all keys of their rows.

    Each of a rank's chunks is one attention, to the keys from the row's first to the chunk's last.

    Args:
        attention: of one chunk.
        scale: of the scores.
        split: of the rows.
    """

    def forward(q_BLHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> tuple[Tensor, list[Saved]]:
        parts = [
            attention.forward(q_BLHD[:, own], k_BSKD[:, :stop], v_BSKD[:, :stop], scale)
            for own, (_, stop) in zip(split.local_chunks, split.spans, strict=True)
        ]
        o_BLHD = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts], 1)
        return o_BLHD, [saved._replace(**DROPPED) for _, saved in parts]

    def backward(
        do_BLHD: Tensor, q_BLHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, o_BLHD: Tensor, kept: Sequence[Saved]
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        dq_parts, pieces = [], []
        for own, (_, stop), part in zip(split.local_chunks, split.spans, kept, strict=True):
            k, v = k_BSKD[:, :stop], v_BSKD[:, :stop]
            saved = part._replace(q=q_BLHD[:, own], k=k, v=v, o=o_BLHD[:, own])
            dq, dk, dv = attention.backward(do_BLHD[:, own], saved)
            dq_parts.append(dq)
            pieces.append((dk, dv))
        wait = split.start_reduce_scatter_kv(pieces)
        return dq_parts[0] if len(dq_parts) == 1 else torch.cat(dq_parts, 1), wait

    return Attending(split.all_gather_kv, forward, backward)
