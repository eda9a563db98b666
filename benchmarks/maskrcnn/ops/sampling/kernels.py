# mypy: allow-untyped-defs
"""Triton kernels that take the candidates with the smallest keys.

The largest key that is taken is found digit by digit, from the highest: all programs count how many candidates have
which digit, of those whose digits before are the largest key's, and then one program a picture finds the digit at which
the counts reach what is wanted. Then all candidates up to that key are put anywhere, and one program a picture finds
the place of each: how many have smaller keys. Keys are computed anew each time, which costs less than reading them.

The order in which atomics come changes nothing that is left. Each picture has two sets: its positives, then its
negatives.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.random_bits.kernels import site_keys, word

BINS: tl.constexpr = tl.constexpr(2048)
"""Of a digit of 11 bits. The digits of 32 bits: 11, 11 and 10."""

_FAR: tl.constexpr = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _own_candidates(label_ptr, seed_ptr, stream, N, BLOCK: tl.constexpr):
    """This program's candidates, their sets (-1: none) and keys, int64."""
    candidate = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = candidate < N
    place = tl.full((), N, tl.int64) * tl.program_id(1) + candidate
    label = tl.load(label_ptr + place, mask=exists, other=-1).to(tl.int32)
    first, second = site_keys(seed_ptr, tl.full((), 1, tl.int32) * stream)
    key = word(place.to(tl.uint32), first, second).to(tl.int64)
    return candidate, tl.where(label >= 0, 1 - label, -1), key


@triton.jit
def sampling_count_kernel(
    label_ptr,  # (B, N) int8
    seed_ptr,  # (1,) int64
    prefix_ptr,  # (B, 2) int64: the largest key's digits before, or -1 if none is taken; read if SHIFT is not the first
    bins_ptr,  # (B, 2, BINS) int32, zeros
    N, stream,
    SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many candidates have which digit. Grid (N / BLOCK, B)."""
    picture = tl.program_id(1).to(tl.int64)
    _, which, key = _own_candidates(label_ptr, seed_ptr, stream, N, BLOCK)
    counted = which >= 0
    if SHIFT + BITS < 32:
        prefix = tl.load(prefix_ptr + picture * 2 + which, mask=counted, other=-1)
        counted &= (key >> (SHIFT + BITS)) == prefix
    digit = (key >> SHIFT) & ((1 << BITS) - 1)
    tl.atomic_add(bins_ptr + (picture * 2 + which) * BINS + digit, 1, mask=counted, sem="relaxed")


@triton.jit
def sampling_digit_kernel(
    bins_ptr,  # (B, 2, BINS) int32
    prefix_ptr,  # (B, 2) int64
    left_ptr,  # (B, 2) int32: how many are wanted of those whose digits before are the largest key's
    taken_ptr,  # (B, 2) int64: positives, and all
    count, most_positive,
    FIRST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The largest key's next digit; with the first one also how many are taken. Grid (B,)."""
    picture = tl.program_id(0).to(tl.int64)
    prefix_ptr += picture * 2
    left_ptr += picture * 2
    taken_ptr += picture * 2
    bin = tl.arange(0, BINS)
    taken = tl.zeros((), tl.int32)
    for which in tl.static_range(2):
        counts = tl.load(bins_ptr + (picture * 2 + which) * BINS + bin)
        if FIRST:
            wanted = tl.minimum(tl.sum(counts, 0), most_positive if which == 0 else count - taken)
            taken += wanted
            tl.store(taken_ptr + which, taken.to(tl.int64))
            prefix = tl.where(wanted > 0, 0, -1).to(tl.int64)
        else:
            wanted = tl.load(left_ptr + which)
            prefix = tl.load(prefix_ptr + which)
        reached = tl.cumsum(counts, 0)
        digit = tl.sum((reached < wanted).to(tl.int32), 0)
        before = tl.sum(tl.where(bin < digit, counts, 0), 0)
        tl.store(left_ptr + which, wanted - before)
        tl.store(prefix_ptr + which, tl.where(prefix >= 0, (prefix << BITS) | digit, -1))


@triton.jit
def sampling_collect_kernel(
    label_ptr,  # (B, N) int8
    seed_ptr,  # (1,) int64
    largest_ptr,  # (B, 2) int64: the largest key that is taken of a set, or -1
    found_ptr,  # (B, 2) int32, zeros
    taken_ptr,  # (B, 2) int64: positives, and all
    keys_ptr,  # (B, C) int64
    candidates_ptr,  # (B, C) int32
    N, stream, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Put candidates up to the largest key anywhere in their set's part of the picture's slots. Grid (N / BLOCK, B)."""
    picture = tl.program_id(1).to(tl.int64)
    candidate, which, key = _own_candidates(label_ptr, seed_ptr, stream, N, BLOCK)
    known = which >= 0
    largest = tl.load(largest_ptr + picture * 2 + which, mask=known, other=-1)
    chosen = known & (key <= largest)
    start = tl.where(which == 1, tl.load(taken_ptr + picture * 2), 0)
    slot = start + tl.atomic_add(found_ptr + picture * 2 + which, 1, mask=chosen, sem="relaxed")
    tl.store(keys_ptr + picture * count + slot, key, mask=chosen)
    tl.store(candidates_ptr + picture * count + slot, candidate, mask=chosen)


@triton.jit
def sampling_order_kernel(
    taken_ptr,  # (B, 2) int64: positives, and all
    keys_ptr,  # (B, C) int64
    candidates_ptr,  # (B, C) int32
    index_ptr,  # (B, C) int64
    count,
    SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Order each set by its keys. SLOTS is the power of two that holds the slots. Grid (C / ROWS, B)."""
    picture = tl.program_id(1).to(tl.int64)
    positives, total = tl.load(taken_ptr + picture * 2), tl.load(taken_ptr + picture * 2 + 1)
    slot, row = tl.arange(0, SLOTS), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.load(keys_ptr + picture * count + slot, mask=slot < total, other=_FAR + 1)
    own = tl.load(keys_ptr + picture * count + row, mask=row < total, other=0)
    same = (slot < positives)[None, :] == (row < positives)[:, None]
    smaller = tl.sum((same & (key[None, :] < own[:, None])).to(tl.int32), 1)
    place = tl.where(row < positives, 0, positives) + smaller
    place = tl.where(row < total, place, row)
    candidate = tl.load(candidates_ptr + picture * count + row, mask=row < total, other=0)
    tl.store(index_ptr + picture * count + place, candidate.to(tl.int64), mask=row < count)
