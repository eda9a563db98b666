"""Operations of the blocks with hand-written backward passes, and attention that is split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.distributed.context_parallel.split import ContextSplit
from common.language.architecture import Architecture
from common.ops.bias_gradient import BIAS_GRADIENT, RowSums
from common.ops.causal_attention import CAUSAL_ATTENTION
from common.ops.causal_attention.reference import DROPPED, CausalAttention, Saved
from common.ops.lora_input import LORA_INPUT
from common.ops.operation import AUTO, Operation, OperationRequest, choose
from common.ops.row_norm import RowNorm

Gradients = tuple[Tensor, Tensor, Tensor]


class Attending(NamedTuple):
    """Attention with a hand-written backward pass.

    Attributes:
        gather: ``(k, v) -> k, v``: all-gathers this rank's keys and values to those of whole rows.
        forward: ``(q, k, v) -> o, kept``: o is (B, S, heads, D); ``kept`` is small and needed by ``backward``.
        backward: ``(do, q, k, v, o, kept, into) -> dq, wait``. ``wait() -> dk, dv`` returns the gradients of this
            rank's tokens, summed over the ranks. ``into``: tensors for the three gradients, if rows are not split; None
            to allocate them.
    """

    gather: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]]


@dataclass(frozen=True)
class DecoderOperations:
    """Chosen implementations; :mod:`common.ops` has their signatures.

    Attributes:
        norm: the norm of the architecture.
        positions: the rotation, or the operation that joins the gradients of query, key and value.
        activation: the passes of the activation, see :class:`common.language.architecture.Activation`.
        lora_input: input of the adapters.
        bias_gradient: computes the bias gradient of the last product in a part of the network.
    """

    attention: Attending
    norm: RowNorm
    positions: Any
    activation: Any
    lora_input: Any
    bias_gradient: RowSums


def block_operations(architecture: type[Architecture], adapters: bool = False) -> dict[str, Operation]:
    """Return the operations of the blocks by name, as in ``model.implementations``."""
    lora: dict[str, Operation] = {"lora_input": LORA_INPUT} if adapters else {}
    return {"attention": CAUSAL_ATTENTION, **architecture.operations(), **lora}


def choose_operations(
    requested: Mapping[str, str],
    architecture: Architecture,
    split: ContextSplit,
    device: torch.device,
    dtype: torch.dtype,
    adapters: bool = False,
) -> tuple[DecoderOperations, dict[str, str]]:
    """Choose an implementation of each operation of the blocks.

    Args:
        requested: ``model.implementations``.
        split: how rows are split over the cp ranks.
        device, dtype: device and dtype of the activations.
        adapters: whether some products have adapters.

    Returns:
        The operations, and the names of the implementations.

    Raises:
        UnsupportedImplementation: the message names ``model.implementations.<operation>``.
    """
    shape = architecture
    request = OperationRequest(device, dtype, {"features": shape.hidden, "head_size": shape.head_size})
    chosen = choose(requested, block_operations(type(shape), adapters), request)
    functions = {name: choice.function for name, choice in chosen.items()}
    activation = functions.get(shape.activation.name)
    operations = DecoderOperations(
        attending(functions["attention"], shape.head_size**-0.5, split),
        functions[shape.norm.name],
        functions["rope" if shape.rotary else "qkv_gradient"],
        None if activation is None else shape.activation.passes(activation),
        functions.get("lora_input"),
        BIAS_GRADIENT.select(AUTO, request).function,
    )
    return operations, {name: choice.name for name, choice in chosen.items()}


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
        do_BLHD: Tensor,
        q_BLHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        o_BLHD: Tensor,
        kept: Sequence[Saved],
        into: Gradients | None = None,
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        if into is not None and split.ranks == 1:
            (saved,) = kept
            attention.backward_into(do_BLHD, saved._replace(q=q_BLHD, k=k_BSKD, v=v_BSKD, o=o_BLHD), into)
            return into[0], lambda: into[1:]
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
