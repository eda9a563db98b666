"""Self-attention within packs: ours, and candidates that no configuration can choose.

Those are what the libraries offer, and ours with other options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops import attention
from common.ops.bench import cases
from common.ops.bench import transformer as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import Handover


def work(packs: int, dtype: torch.dtype, d_qkv_bytes: int = 2) -> dict[str, tuple[float, float]]:
    """Bytes and FLOP of both directions."""
    elements = packs * size.LENGTH * size.HIDDEN
    hidden = float(elements * dtype.itemsize)
    product = 2.0 * size.HEAD_DIM * size.HEADS * size.pairs(packs)
    return {"moved": (4 * hidden, 5 * hidden + 3.0 * elements * d_qkv_bytes), "flops": (2 * product, 5 * product)}


def context_gradient(packs: int, dtype: torch.dtype) -> Tensor:
    """Gradient of the result, (T, H, D)."""
    return size.normal(dtype, packs * size.LENGTH, size.HEADS, size.HEAD_DIM)


def queries_keys_values(packs: int, dtype: torch.dtype) -> Tensor:
    """(T, 3, H, D)."""
    return size.leaf(dtype, packs * size.LENGTH, 3, size.HEADS, size.HEAD_DIM)


def case(function: Callable[..., Tensor], packs: int, dtype: torch.dtype, *, p: float = size.PROBABILITY) -> list[Pass]:
    """An implementation that a configuration can choose, with the gradient of the bias."""
    qkv, bias, seed = queries_keys_values(packs, dtype), size.leaf(dtype, 3 * size.HIDDEN), size.seed()
    starts, lengths = size.sequences(packs)
    return both_ways(
        lambda: function(qkv, starts, lengths, size.LENGTH, DropoutMask(p, seed, size.SITE), bias),
        [qkv, bias],
        [context_gradient(packs, dtype)],
        **work(packs, dtype),
    )


def fp8_case(function: Callable[..., Tensor], packs: int, dtype: torch.dtype) -> list[Pass]:
    """The same with the gradients of queries, keys and values in FP8."""
    qkv, bias, seed = queries_keys_values(packs, dtype), size.leaf(dtype, 3 * size.HIDDEN), size.seed()
    starts, lengths = size.sequences(packs)
    mask, handover = DropoutMask(size.PROBABILITY, seed, size.SITE), Handover(size.fresh_scaling())
    return both_ways(
        lambda: function(qkv, starts, lengths, size.LENGTH, mask, bias, handover=handover),
        [qkv, bias],
        [context_gradient(packs, dtype)],
        **work(packs, dtype, d_qkv_bytes=1),
    )


def without_bias_case(packs: int, dtype: torch.dtype) -> list[Pass]:
    """Ours without the gradient of the bias, as the libraries have it."""
    function = attention.ATTENTION.function("triton")
    qkv, seed = queries_keys_values(packs, dtype), size.seed()
    starts, lengths = size.sequences(packs)
    return both_ways(
        lambda: function(qkv, starts, lengths, size.LENGTH, DropoutMask(size.PROBABILITY, seed, size.SITE)),
        [qkv],
        [context_gradient(packs, dtype)],
        **work(packs, dtype),
    )


def sdpa_case(packs: int, dtype: torch.dtype) -> list[Pass]:
    """PyTorch's scaled_dot_product_attention over whole packs, with a mask that keeps their sequences apart."""
    qkv = size.leaf(dtype, packs, size.LENGTH, 3, size.HEADS, size.HEAD_DIM)
    lengths = torch.tensor(size.sequence_lengths(packs), device=cases.DEVICE)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=cases.DEVICE), lengths).view(packs, size.LENGTH)
    mask = (owner[:, :, None] == owner[:, None, :])[:, None]

    def forward() -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=size.PROBABILITY)

    gradient = size.normal(dtype, packs, size.HEADS, size.LENGTH, size.HEAD_DIM)
    return both_ways(forward, [qkv], [gradient], **work(packs, dtype))


def cumulative_lengths(packs: int) -> Tensor:
    """First token of each sequence and the end of the last, which absent ones repeat; int32 (3 * packs + 1,)."""
    _, lengths = size.sequences(packs)
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def flash_case(packs: int, dtype: torch.dtype) -> list[Pass]:
    """The FlashAttention kernel in PyTorch, variable length, with dropout."""
    qkv = queries_keys_values(packs, dtype).detach()
    bounds = cumulative_lengths(packs)
    gradient = context_gradient(packs, dtype)
    settings = (bounds, bounds, size.LENGTH, size.LENGTH, size.PROBABILITY, False)

    def forward() -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(*qkv.unbind(1), *settings, False)
        return result

    def both() -> Tensor:
        output, lse, state, unused = forward()[:4]
        gradients = torch.ops.aten._flash_attention_backward(
            gradient, *qkv.unbind(1), output, lse, *settings, state, unused
        )
        return torch.stack(gradients, 1)

    (moved, moved_back), (flops, flops_back) = work(packs, dtype).values()
    return [Pass("forward", forward, moved, flops), Pass("backward", both, moved_back, flops_back, after="forward")]


def entries() -> list[Entry]:
    """Every implementation, of which a layer has one, and the candidates."""
    ours = attention.ATTENTION.function("triton")
    sizes = {"head_dim": size.HEAD_DIM}
    return [
        *each("attention", attention.ATTENTION, "triton", sizes, case, calls=size.LAYERS),
        *each("attention to fp8", attention.ATTENTION, "triton", sizes, fp8_case, calls=0),
        Entry("attention triton, no bias gradient", 0, without_bias_case),
        Entry("attention triton, no dropout", 0, functools.partial(case, ours, p=0.0)),
        Entry("attention SDPA", 0, sdpa_case),
        Entry("attention aten flash", 0, flash_case),
    ]


def sweeps() -> dict[str, Sweep]:
    """Queries, keys, warps and stages of the three kernels."""
    from common.ops.attention import triton

    blocks = [(64, 64, 4, stages) for stages in (1, 2, 3, 4)]
    blocks += [(128, 64, 4, 2), (128, 64, 8, 2), (64, 128, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 8, 2)]
    key_blocks = [*blocks, (32, 64, 4, 2), (32, 64, 4, 3), (32, 64, 8, 2), (128, 64, 4, 3)]
    choices = {"forward": blocks, "query_gradient": blocks, "key_value_gradient": key_blocks}
    build = functools.partial(case, attention.ATTENTION.function("triton"), size.PACKS)
    return {
        f"attention {key}": Sweep(triton.TILES, key, tiles, build, key != "forward") for key, tiles in choices.items()
    }
