"""Attention of the U-Net's tokens to each other, packed as one product gives them, and to a caption's."""

from __future__ import annotations

import functools

import torch

from common.ops import dense_attention
from common.ops.bench import diffusion as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import leaf, normal, size_of
from common.ops.dense_attention import Attention


def case(
    function: Attention, batch: int, dtype: torch.dtype, *, pictures: int, tokens: int, heads: int, keys: int
) -> list[Pass]:
    """To ``keys`` of a caption, or to each other if there are none; backward has all three gradients."""
    do = normal(dtype, pictures, tokens, heads, size.HEAD_SIZE)
    product = 2.0 * pictures * heads * size.HEAD_SIZE * tokens * (keys or tokens)
    flops = 2 * product, 5 * product
    if not keys:
        qkv = leaf(dtype, pictures, tokens, 3, heads, size.HEAD_SIZE)
        moved = size_of(qkv) + size_of(do), 2 * size_of(qkv) + 2 * size_of(do)
        return both_ways(lambda: function.packed(qkv), [qkv], [do], moved=moved, flops=flops)
    q = leaf(dtype, pictures, tokens, heads, size.HEAD_SIZE)
    k, v = (leaf(dtype, pictures, keys, heads, size.HEAD_SIZE) for _ in range(2))
    read = size_of(q) + 2 * size_of(k)
    moved = read + size_of(do), 2 * read + 2 * size_of(do)
    return both_ways(lambda: function(q, k, v), [q, k, v], [do], moved=moved, flops=flops)


def entries() -> list[Entry]:
    """Every implementation at every level, at both batches."""
    found = []
    for pictures in size.BATCHES:
        for tokens, heads in size.TOKENS_AND_HEADS:
            for keys in (0, size.CAPTION):
                sizes = {"head_size": size.HEAD_SIZE, "queries": tokens, "keys": keys or tokens}
                build = functools.partial(case, pictures=pictures, tokens=tokens, heads=heads, keys=keys)
                name = f"dense_attention {pictures}x{heads}x{tokens}{f' to {keys}' if keys else ''}"
                found += each(name, dense_attention.DENSE_ATTENTION, "cudnn", sizes, build, calls=0)
    return found


def sweeps() -> dict[str, Sweep]:
    """The libraries' tiles are their own."""
    return {}
