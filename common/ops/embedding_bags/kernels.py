# mypy: allow-untyped-defs
"""Triton kernels of embedding bags: rows of keys, sums of rows, and updates by sums over runs of equal rows.

Keys are sorted by row. A program of the update kernel loads the gradients of all keys of a tile. It multiplies the
matrix (row of key i == row of key j) by the gradients, which gives, for every key, the sum over the keys of its row in
the tile. 0 and 1 are exact in 16 bit, so this runs on tensor cores and sums in fp32, without a loop over the run. If a
run is within one tile, its first key updates the row. If it crosses tiles, each tile writes a partial sum, and a second
kernel adds these in order, without atomics.

Bytes per key: 264 for row, source and a gradient of 128 values in 16 bit. Bytes per updated row: 2,048.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.random_bits.kernels import site_keys, word

DENSE: tl.constexpr = tl.constexpr(0)
SGD: tl.constexpr = tl.constexpr(1)
ADAGRAD: tl.constexpr = tl.constexpr(2)


@triton.jit
def _bag_of(table_ptr, bag):
    """Return column, hotness, base, rows, shard and shards of bags."""
    fields = table_ptr + bag * 6
    return (
        tl.load(fields),
        tl.load(fields + 1),
        tl.load(fields + 2),
        tl.load(fields + 3),
        tl.load(fields + 4),
        tl.load(fields + 5),
    )


@triton.jit
def embedding_rows_kernel(
    ids_ptr,  # (N, columns)
    table_ptr,  # (B, 6) int32
    lookup_ptr,  # (K, 2) int32
    row_ptr,  # (N, K) int32, written
    keys, rows, ids_stride,
    LOOKUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row of every key; ``rows`` for keys without a row in the store. Grid (ceil(keys / BLOCK),)."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < keys
    sample, lookup = position // LOOKUPS, position % LOOKUPS
    bag, column = tl.load(lookup_ptr + 2 * lookup), tl.load(lookup_ptr + 2 * lookup + 1)
    _, _, base, table_rows, shard, shards = _bag_of(table_ptr, bag)
    key = tl.load(ids_ptr + sample.to(tl.int64) * ids_stride + column, mask=inside, other=-1)
    own = (key >= 0) & (key < table_rows) & (key % shards == shard)
    tl.store(row_ptr + position, tl.where(own, base + key // shards, rows).to(tl.int32), mask=inside)


@triton.jit
def embedding_sources_kernel(
    row_ptr,  # (M,) int32, sorted
    unsorted_ptr,  # (M,) int64
    lookup_ptr,  # (K, 2) int32
    source_ptr,  # (M,) int32, written
    ours_ptr,  # 0-d int32, written
    keys, rows,
    BAGS: tl.constexpr, LOOKUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write sample and bag of every sorted key, given its position before sorting, and the number of keys with a row.

    Grid (ceil((keys + 1) / BLOCK),): the first position after the keys with a row, at most ``keys``, writes that
    number.
    """
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < keys
    unsorted = tl.load(unsorted_ptr + position, mask=inside, other=0).to(tl.int32)
    bag = tl.load(lookup_ptr + 2 * (unsorted % LOOKUPS))
    tl.store(source_ptr + position, unsorted // LOOKUPS * BAGS + bag, mask=inside)
    row = tl.load(row_ptr + position, mask=inside, other=rows)
    before = tl.load(row_ptr + position - 1, mask=(position > 0) & (position <= keys), other=-1)
    first_behind = (position <= keys) & (row >= rows) & (before < rows)
    tl.store(ours_ptr + tl.zeros((BLOCK,), tl.int32), position, mask=first_behind)


@triton.jit
def embedding_pool_kernel(
    rows_ptr,  # (R, WIDTH)
    ids_ptr,  # (N, columns)
    table_ptr,  # (B, 6) int32
    largest_first_ptr,  # (B,) int32
    out_ptr,  # (N, B, WIDTH), written; with PEER_SAMPLES, only its dtype counts
    address_ptr,  # (N / PEER_SAMPLES,) int64, buffers that are written; None without PEER_SAMPLES
    position_ptr,  # (B, 2) int32, first vector and stride of each bag; None without PEER_SAMPLES
    samples, ids_stride, sample_stride, bag_stride,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, SAMPLES: tl.constexpr, LOOKUPS: tl.constexpr,
    PEER_SAMPLES: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Write the sums of the rows of bags. Grid (ceil(samples / SAMPLES), bags); LOOKUPS rows per sample load at a time.

    A program loads the next keys before it waits for the rows of the current ones. With PEER_SAMPLES, the samples per
    buffer, vectors go to several buffers, in which each vector begins at a multiple of ALIGNMENT bytes.
    """
    bag = tl.load(largest_first_ptr + tl.program_id(1))
    column, hotness, base, table_rows, shard, shards = _bag_of(table_ptr, bag)
    sample = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    lookup = tl.arange(0, LOOKUPS)[None, :]
    value = tl.arange(0, BLOCK_W)
    inside = (sample < samples)[:, None]
    key_ptr = ids_ptr + sample.to(tl.int64)[:, None] * ids_stride + column + lookup
    total = tl.zeros((SAMPLES, LOOKUPS, BLOCK_W), tl.float32)
    key = tl.load(key_ptr, mask=inside & (lookup < hotness), other=-1)
    for first in range(0, hotness, LOOKUPS):
        later = first + LOOKUPS
        key_later = tl.load(key_ptr + later, mask=inside & (later + lookup < hotness), other=-1)
        own = (key >= 0) & (key < table_rows) & (key % shards == shard)
        row = (base + key // shards).to(tl.int64)
        total += tl.load(
            rows_ptr + row[:, :, None] * WIDTH + value[None, None, :],
            mask=own[:, :, None] & (value < WIDTH)[None, None, :],
            other=0.0,
        ).to(tl.float32)
        key = key_later
    if PEER_SAMPLES:
        address = tl.load(address_ptr + sample // PEER_SAMPLES, mask=sample < samples, other=0)
        first_vector, stride = tl.load(position_ptr + 2 * bag).to(tl.int64), tl.load(position_ptr + 2 * bag + 1)
        vector = first_vector + (sample % PEER_SAMPLES).to(tl.int64) * stride
        vector_bytes: tl.constexpr = WIDTH * (out_ptr.dtype.element_ty.primitive_bitwidth // 8)
        start = tl.multiple_of((address + vector * vector_bytes).to(out_ptr.dtype), ALIGNMENT)
        target = start[:, None] + value[None, :]
    else:
        target = out_ptr + sample.to(tl.int64)[:, None] * sample_stride + bag * bag_stride + value[None, :]
    tl.store(target, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=inside & (value < WIDTH)[None, :])


@triton.jit
def _round_by_chance(x, row, column, seed_ptr):
    """Round fp32 (rows, columns) to values of fp16 as :func:`common.ops.embedding_bags.reference.round_by_chance`."""
    first, second = site_keys(seed_ptr, row)
    bits = word(column.to(tl.uint32)[None, :], first[:, None], second[:, None])
    chance = (bits >> 8).to(tl.float32) * (2.0**-24)
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    step = tl.minimum(tl.maximum(exponent - 10, 127 - 24), 254)
    scaled = x * ((254 - step) << 23).to(tl.float32, bitcast=True)
    below = tl.floor(scaled)
    return tl.where(chance < scaled - below, below + 1.0, below) * (step << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_rows(rows_ptr, state_ptr, offset, mask, RULE: tl.constexpr):
    """Return rows and state in fp32; 0 if the rule does not need them."""
    before, state = 0.0, 0.0
    if RULE != DENSE:
        before = tl.load(rows_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if RULE == ADAGRAD:
        state = tl.load(state_ptr + offset, mask=mask, other=0.0)
    return before, state


@triton.jit
def _store_rows(
    rows_ptr, state_ptr, offset, mask, before, state, sums, row, column,
    learning_rate_ptr, grad_factor_ptr, seed_ptr, epsilon, RULE: tl.constexpr,
):  # fmt: skip
    """Update the loaded rows by the sums (rows, columns), or store the sums. With a seed, round stochastically."""
    if RULE == DENSE:
        after = sums
    else:
        gradient = sums * tl.load(grad_factor_ptr)
        if RULE == ADAGRAD:
            state += gradient * gradient
            tl.store(state_ptr + offset, state, mask=mask)
            gradient = gradient / (tl.sqrt(state) + epsilon)
        after = before - tl.load(learning_rate_ptr) * gradient
        if seed_ptr is not None:
            after = _round_by_chance(after, row, column, seed_ptr)
    tl.store(rows_ptr + offset, after.to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit
def embedding_update_kernel(
    row_ptr,  # (M,) int32, sorted
    source_ptr,  # (M,) int32
    ours_ptr,  # 0-d int32, number of keys with a row
    gradient_ptr,  # (N, B, WIDTH)
    rows_ptr,  # (R, WIDTH), written
    state_ptr,  # (R, WIDTH) fp32, written, if ADAGRAD
    partial_ptr,  # (2 tiles, WIDTH) fp32, written for the runs that enter a tile, and for those that begin and leave it
    learning_rate_ptr, grad_factor_ptr, write_ptr, seed_ptr,
    sample_stride, bag_stride, epsilon,
    RULE: tl.constexpr, BAGS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Update the rows whose keys are all in one tile. Grid (programs,); programs take tiles in turn."""
    count = tl.load(ours_ptr)
    if RULE != DENSE:
        count = tl.where(tl.load(write_ptr), count, 0)
    position = tl.arange(0, TILE)
    column = tl.arange(0, BLOCK_W)
    existing = (column < WIDTH)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, TILE), tl.num_programs(0), num_stages=STAGES):
        start = tile * TILE
        stop = tl.minimum(start + TILE, count)
        incoming = tl.load(row_ptr + start - 1, mask=start > 0, other=-1)
        outgoing = tl.load(row_ptr + stop, mask=stop < count, other=-1)
        last_row = tl.load(row_ptr + stop - 1)
        outgoing = tl.where(outgoing == last_row, last_row, -1)

        index = start + position
        inside = index < count
        row = tl.load(row_ptr + index, mask=inside, other=-1)
        before = tl.load(row_ptr + index - 1, mask=inside & (index > 0), other=-1)
        source = tl.load(source_ptr + index, mask=inside, other=0)
        begins = row != before
        comes_in = (position == 0) & (row == incoming)
        goes_out = row == outgoing

        target = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        whole = (inside & begins & (goes_out == 0))[:, None] & existing
        rows_before, state = _load_rows(rows_ptr, state_ptr, target, whole, RULE)  # loads together with the gradients
        vector = (source // BAGS).to(tl.int64) * sample_stride + (source % BAGS).to(tl.int64) * bag_stride
        gradient = tl.load(gradient_ptr + vector[:, None] + column[None, :], mask=inside[:, None] & existing, other=0.0)
        same = tl.where(row[:, None] == row[None, :], 1.0, 0.0).to(gradient.dtype)
        sums = tl.dot(same, gradient, input_precision="ieee")

        left = inside & (comes_in | (begins & goes_out))
        slot = (2 * tile + tl.where(comes_in, 0, 1)).to(tl.int64)
        tl.store(partial_ptr + slot[:, None] * WIDTH + column[None, :], sums, mask=left[:, None] & existing)
        _store_rows(
            rows_ptr, state_ptr, target, whole, rows_before, state, sums, row, column,
            learning_rate_ptr, grad_factor_ptr, seed_ptr, epsilon, RULE,
        )  # fmt: skip


@triton.jit
def embedding_long_runs_kernel(
    row_ptr,  # (M,) int32, sorted
    ours_ptr,  # 0-d int32, number of keys with a row
    rows_ptr,  # (R, WIDTH), written
    state_ptr,  # (R, WIDTH) fp32, written, if ADAGRAD
    partial_ptr,  # (2 tiles, WIDTH) fp32
    learning_rate_ptr, grad_factor_ptr, write_ptr, seed_ptr, epsilon,
    RULE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, TILE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Update the rows whose run of keys crosses tiles. The program of the tile in which a run begins handles it.

    Grid (programs,); programs take tiles in turn.
    """
    count = tl.load(ours_ptr)
    if RULE != DENSE:
        count = tl.where(tl.load(write_ptr), count, 0)
    tiles = tl.cdiv(count, TILE)
    column = tl.arange(0, BLOCK_W)
    existing = (column < WIDTH)[None, :]
    lane = tl.arange(0, TOGETHER)
    for tile in tl.range(tl.program_id(0), tiles - 1, tl.num_programs(0), num_stages=1):
        start = tile * TILE
        row = tl.load(row_ptr + start + TILE - 1)
        begun_before = tl.load(row_ptr + start - 1, mask=start > 0, other=-1) == row
        goes_on = tl.load(row_ptr + start + TILE) == row
        if goes_on & (begun_before == 0):
            target = row.to(tl.int64) * WIDTH + column[None, :]
            before, state = _load_rows(rows_ptr, state_ptr, target, existing, RULE)
            total = tl.load(
                partial_ptr + (2 * tile + 1 + 0 * lane).to(tl.int64)[:, None] * WIDTH + column[None, :],
                mask=(lane == 0)[:, None] & existing,
                other=0.0,
            )
            later = tile + 1
            going = True
            while going:
                others = later + lane
                of_run = tl.load(row_ptr + others * TILE, mask=others < tiles, other=-1) == row
                total += tl.load(
                    partial_ptr + (2 * others).to(tl.int64)[:, None] * WIDTH + column[None, :],
                    mask=of_run[:, None] & existing,
                    other=0.0,
                )
                going = tl.min(of_run.to(tl.int32), 0) == 1
                later += TOGETHER
            one = row + tl.zeros((1,), tl.int32)
            _store_rows(
                rows_ptr, state_ptr, target, existing, before, state, tl.sum(total, 0)[None, :], one, column,
                learning_rate_ptr, grad_factor_ptr, seed_ptr, epsilon, RULE,
            )  # fmt: skip
