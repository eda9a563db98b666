"""Operations of the decoders with hand-written backward passes, and attention that is split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.distributed.context_parallel.split import ContextSplit
from common.nn.decoder import DecoderArchitecture
from common.ops.causal_attention import CAUSAL_ATTENTION
from common.ops.causal_attention.reference import DROPPED, CausalAttention, Saved
from common.ops.operation import Operation, OperationRequest, choose
from common.ops.rope import ROPE
from common.ops.row_norm import RMS_NORM
from common.ops.swiglu import SWIGLU

DECODER_OPERATIONS: dict[str, Operation] = {
    "attention": CAUSAL_ATTENTION,
    "rms_norm": RMS_NORM,
    "rope": ROPE,
    "swiglu": SWIGLU,
}
"""Operations of every such decoder by name, as in ``model.implementations``."""


class Attending(NamedTuple):
    """Attention with a hand-written backward pass.

    Attributes:
        gather: ``(k, v) -> k, v``: all-gathers this rank's keys and values to those of whole rows.
        forward: ``(q, k, v) -> o, kept``: o is (B, S, heads, D); ``kept`` is small and needed by ``backward``.
        backward: ``(do, q, k, v, o, kept) -> dq, wait``. ``wait() -> dk, dv`` returns the gradients of this rank's
            tokens, summed over the ranks.
    """

    gather: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]]


@dataclass(frozen=True)
class DecoderOperations:
    """The chosen implementations of :data:`DECODER_OPERATIONS`. :mod:`common.ops` documents the signatures."""

    rms_norm: Any
    rope: Any
    swiglu: Any
    attention: Attending


def choose_operations(
    operations: Mapping[str, Operation],
    requested: Mapping[str, str],
    architecture: DecoderArchitecture,
    split: ContextSplit,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Choose an implementation of each operation.

    Args:
        operations: operations by name, as in ``model.implementations``; must contain ``attention``.
        requested: ``model.implementations``.
        split: how rows are split over the cp ranks.
        device, dtype: device and dtype of the activations.

    Returns:
        The functions by operation, with :class:`Attending` for ``attention``, and the names of the implementations.

    Raises:
        UnsupportedImplementation: the message names ``model.implementations.<operation>``.
    """
    sizes = {"features": architecture.hidden, "head_size": architecture.head_size}
    chosen = choose(requested, operations, OperationRequest(device, dtype, sizes))
    functions = {name: choice.function for name, choice in chosen.items()}
    functions["attention"] = attending(functions["attention"], architecture.head_size**-0.5, split)
    return functions, {name: choice.name for name, choice in chosen.items()}


def attending(attention: CausalAttention, scale: float, split: ContextSplit) -> Attending:
    """Return the attention of this rank's queries to all keys of their rows.

    Each chunk of this rank is one call of ``attention``, with the keys from the start of the row to the end of the
    chunk.

    Args:
        attention: implementation for one chunk.
        scale: factor on the scores.
        split: how rows are split over the cp ranks.
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
