"""The cases of :mod:`benchmarks.bert.ops.bench`: each operation in each implementation at the sizes of BERT-large.

48 packs of 512 tokens: 23 of one sequence, 2 of two, 23 of three. Attention has candidates that no configuration can
choose: what the libraries offer, and ours with other options.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bert.ops import attention, bias_gelu, cross_entropy, dropout, dropout_add_norm
from common.errors import UnsupportedImplementation
from common.ops.implementation import Implementation, OperationRequest

PACKS = 48
LENGTH = 512
TOKENS = PACKS * LENGTH
HEADS = 16
HEAD_DIM = 64
HIDDEN = HEADS * HEAD_DIM
FEED_FORWARD = 4096
VOCABULARY = 30522
PADDED_VOCABULARY = 30528
MASKED = 80 * PACKS
PROBABILITY = 0.1
SITE = 3


class Case(NamedTuple):
    """One operation in one implementation.

    Attributes:
        forward: enqueues one call; its result is what ``backward`` takes.
        backward: enqueues the gradients of one call.
        forward_bytes, backward_bytes: each input read once, each output written once.
        flops: of forward and of backward, where arithmetic counts.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    forward_bytes: float
    backward_bytes: float
    flops: tuple[float, float] | None = None


def sequence_lengths() -> list[int]:
    """Tokens of the sequences, pack after pack; where packs are cut is random but the same in every run."""
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for count, packs in ((1, 23), (2, 2), (3, 23)):
        for _ in range(packs):
            cuts = (torch.randperm(LENGTH - 1, generator=generator)[: count - 1] + 1).sort().values.tolist()
            lengths += [end - start for start, end in itertools.pairwise([0, *cuts, LENGTH])]
    return lengths


def sequences() -> tuple[Tensor, Tensor]:
    """Starts and lengths, int32 (3 * PACKS,), absent ones last."""
    lengths = sequence_lengths()
    starts = [0, *itertools.accumulate(lengths[:-1])]
    absent = [0] * (3 * PACKS - len(lengths))
    first, second = (torch.tensor(values + absent, dtype=torch.int32, device="cuda") for values in (starts, lengths))
    return first, second


def pairs() -> int:
    """Pairs of tokens that attend to each other."""
    return sum(length * length for length in sequence_lengths())


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    """Normal values that require a gradient."""
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def seed() -> Tensor:
    """The dropout seed."""
    return torch.tensor(1234567890123, device="cuda")


def differentiated(function: Callable[[], Any], inputs: list[Tensor], *gradients: Tensor) -> dict[str, Any]:
    """Forward and backward, with autograd, of a function with one result or as many as ``gradients``."""
    return {"forward": function, "backward": lambda y: torch.autograd.grad(y, inputs, gradients)}


def dropout_case(function: Callable[..., Tensor], dtype: torch.dtype) -> Case:
    """Of hidden states."""
    x, seed_ = random(dtype, TOKENS, HIDDEN), seed()
    size = x.numel() * x.element_size()
    run = differentiated(lambda: function(x, PROBABILITY, seed_, SITE), [x], torch.randn_like(x))
    return Case(**run, forward_bytes=2 * size, backward_bytes=2 * size)


def norm_case(function: Callable[..., Any], dtype: torch.dtype) -> Case:
    """Twice a layer, for two readers."""
    x, residual = random(dtype, TOKENS, HIDDEN), random(dtype, TOKENS, HIDDEN)
    bias, weight, norm_bias = (random(dtype, HIDDEN) for _ in range(3))
    seed_ = seed()
    size = x.numel() * x.element_size()
    run = differentiated(
        lambda: function(x, bias, residual, weight, norm_bias, PROBABILITY, 1e-12, seed_, SITE, twice=True),
        [x, bias, residual, weight, norm_bias],
        torch.randn_like(x),
        torch.randn_like(x),
    )
    return Case(**run, forward_bytes=3 * size, backward_bytes=6 * size)


def gelu_case(function: Callable[..., Tensor], dtype: torch.dtype) -> Case:
    """Of the feed-forward layer."""
    x, bias = random(dtype, TOKENS, FEED_FORWARD), random(dtype, FEED_FORWARD)
    size = x.numel() * x.element_size()
    run = differentiated(lambda: function(x, bias), [x, bias], torch.randn_like(x))
    return Case(**run, forward_bytes=2 * size, backward_bytes=3 * size)


def loss_case(function: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> Case:
    """Over the vocabulary; 38 masked tokens a sequence, the gradient in place of the logits."""
    logits = random(dtype, MASKED, PADDED_VOCABULARY)
    labels = torch.randint(VOCABULARY, (MASKED,), device="cuda", dtype=torch.int32)
    labels[76 * PACKS :] = cross_entropy.NO_LABEL
    weights = torch.rand(MASKED, device="cuda")
    size = logits.numel() * logits.element_size()

    def forward() -> Tensor:
        return function(logits, labels, VOCABULARY, inplace=True)[0]

    return Case(**differentiated(forward, [logits], weights), forward_bytes=size, backward_bytes=2 * size)


def attention_sizes(dtype: torch.dtype) -> dict[str, Any]:
    """Bytes and FLOP of attention."""
    hidden = TOKENS * HIDDEN * dtype.itemsize
    product = 2 * HEAD_DIM * HEADS * pairs()
    return {
        "forward_bytes": 4 * hidden,
        "backward_bytes": 8 * hidden,
        "flops": (2.0 * product, 5.0 * product),
    }


def attention_case(function: Callable[..., Tensor], dtype: torch.dtype, p: float = PROBABILITY) -> Case:
    """An implementation that a configuration can choose, with the gradient of the bias."""
    qkv, bias, seed_ = random(dtype, TOKENS, 3, HEADS, HEAD_DIM), random(dtype, 3 * HIDDEN), seed()
    starts, lengths = sequences()
    run = differentiated(
        lambda: function(qkv, starts, lengths, LENGTH, p, seed_, SITE, bias),
        [qkv, bias],
        torch.randn(TOKENS, HEADS, HEAD_DIM, device="cuda").to(dtype),
    )
    return Case(**run, **attention_sizes(dtype))


def attention_without_bias_case(dtype: torch.dtype) -> Case:
    """Ours without the gradient of the bias, as the libraries have it."""
    function = attention.IMPLEMENTATIONS["triton"].function
    qkv, seed_ = random(dtype, TOKENS, 3, HEADS, HEAD_DIM), seed()
    starts, lengths = sequences()
    run = differentiated(
        lambda: function(qkv, starts, lengths, LENGTH, PROBABILITY, seed_, SITE),
        [qkv],
        torch.randn(TOKENS, HEADS, HEAD_DIM, device="cuda").to(dtype),
    )
    return Case(**run, **attention_sizes(dtype))


def sdpa_case(dtype: torch.dtype) -> Case:
    """PyTorch's scaled_dot_product_attention over whole packs, with a mask that keeps their sequences apart."""
    qkv = random(dtype, PACKS, LENGTH, 3, HEADS, HEAD_DIM)
    lengths = torch.tensor(sequence_lengths(), device="cuda")
    owner = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths).view(PACKS, LENGTH)
    mask = (owner[:, :, None] == owner[:, None, :])[:, None]

    def forward() -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=PROBABILITY)

    gradient = torch.randn(PACKS, HEADS, LENGTH, HEAD_DIM, device="cuda").to(dtype)
    return Case(**differentiated(forward, [qkv], gradient), **attention_sizes(dtype))


def cumulative_lengths() -> Tensor:
    """First token of each sequence and the end of the last, which absent ones repeat; int32 (3 * PACKS + 1,)."""
    _, lengths = sequences()
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def flash_case(dtype: torch.dtype) -> Case:
    """The FlashAttention kernel in PyTorch, variable length, with dropout."""
    qkv = random(dtype, TOKENS, 3, HEADS, HEAD_DIM).detach()
    bounds = cumulative_lengths()
    gradient = torch.randn(TOKENS, HEADS, HEAD_DIM, device="cuda").to(dtype)
    settings = (bounds, bounds, LENGTH, LENGTH, PROBABILITY, False)

    def forward() -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(*qkv.unbind(1), *settings, False)
        return result

    def backward(saved: tuple[Tensor, ...]) -> Tensor:
        output, lse, state, unused = saved[:4]
        gradients = torch.ops.aten._flash_attention_backward(
            gradient, *qkv.unbind(1), output, lse, *settings, state, unused
        )
        return torch.stack(gradients, 1)

    return Case(forward, backward, **attention_sizes(dtype))


def transformer_engine_case(dtype: torch.dtype) -> Case:
    """Transformer Engine's DotProductAttention, which picks its back end."""
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(
        HEADS, HEAD_DIM, attention_dropout=PROBABILITY, qkv_format="thd", attn_mask_type="padding"
    )
    qkv, bounds = random(dtype, TOKENS, 3, HEADS, HEAD_DIM), cumulative_lengths()

    def forward() -> Tensor:
        result: Tensor = module(
            *qkv.unbind(1), cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH
        )
        return result

    return Case(
        **differentiated(forward, [qkv], torch.randn(TOKENS, HIDDEN, device="cuda").to(dtype)), **attention_sizes(dtype)
    )


OPERATIONS: dict[str, tuple[dict[str, Implementation], Callable[..., Case], int]] = {
    "dropout": (dropout.IMPLEMENTATIONS, dropout_case, HIDDEN),
    "dropout_add_norm": (dropout_add_norm.IMPLEMENTATIONS, norm_case, HIDDEN),
    "bias_gelu": (bias_gelu.IMPLEMENTATIONS, gelu_case, FEED_FORWARD),
    "cross_entropy": (cross_entropy.IMPLEMENTATIONS, loss_case, PADDED_VOCABULARY),
    "attention": (attention.IMPLEMENTATIONS, attention_case, HEAD_DIM),
}
"""Operation to its implementations, its case, and the channels that a request for it names."""

CANDIDATES: dict[str, Callable[[torch.dtype], Case]] = {
    "attention triton, no bias gradient": attention_without_bias_case,
    "attention triton, no dropout": lambda dtype: attention_case(
        attention.IMPLEMENTATIONS["triton"].function, dtype, 0.0
    ),
    "attention SDPA": sdpa_case,
    "attention aten flash": flash_case,
    "attention Transformer Engine": transformer_engine_case,
}
"""What else could serve as attention, and ours with other options."""


def cases() -> dict[str, Callable[[torch.dtype], Case]]:
    """Every case by its name."""
    found: dict[str, Callable[[torch.dtype], Case]] = {}
    for operation, (implementations, build, channels) in OPERATIONS.items():
        for implementation in implementations.values():
            found[f"{operation} {implementation.name}"] = functools.partial(_requested, implementation, build, channels)
    return found | CANDIDATES


def _requested(implementation: Implementation, build: Callable[..., Case], channels: int, dtype: torch.dtype) -> Case:
    reason = implementation.unsupported(OperationRequest(torch.device("cuda"), dtype, channels))
    if reason is not None:
        raise UnsupportedImplementation(reason)
    return build(implementation.function, dtype)
