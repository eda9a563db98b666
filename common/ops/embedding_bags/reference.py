"""The reference of :mod:`common.ops.embedding_bags`. Shapes: see :mod:`common.ops.embedding_bags.bags`.

Arithmetic is fp64 for fp64 inputs, otherwise fp32. Shapes do not depend on keys. ``update`` and ``dense_gradient`` add
with ``index_add_``, whose order is fixed on a CPU, but on a GPU only with PyTorch's deterministic algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.embedding_bags.bags import (
    AdagradRows,
    Bags,
    PeerVectors,
    Rule,
    SortedKeys,
    check_sums,
    check_update,
)
from common.ops.random_bits.reference import words
from common.ops.triton_support import widen


def round_by_chance(x_SW: Tensor, seed: Tensor, row_S: Tensor) -> Tensor:
    """Round rows stochastically to fp16: the distance to the lower neighbour is the probability of rounding up.

    The result is correct on average, whereas rounding to nearest would lose updates that are much smaller than a row
    (Gupta et al., arXiv:1502.02551). Values above the largest fp16 number become infinite. The bits are those of
    :mod:`common.ops.random_bits` with the row as site and the column as index.

    Args:
        x_SW: fp32.
        seed: 0-d int64, different for every update.
        row_S: indices of the rows in the store.
    """
    column_W = torch.arange(x_SW.shape[1], device=x_SW.device)
    bits_SW = words(column_W, seed, row_S.unsqueeze(1))
    chance_SW = ((bits_SW >> 8) & 0xFFFFFF).float() * 2.0**-24
    exponent_SW = (x_SW.view(torch.int32) >> 23) & 0xFF  # with a bias of 127
    step_SW = (exponent_SW - 10).clamp(min=127 - 24, max=254)  # spacing of fp16, at least 2**-24
    scaled_SW = x_SW * ((254 - step_SW) << 23).view(torch.float32)
    below_SW = scaled_SW.floor()
    up_SW = chance_SW < scaled_SW - below_SW
    return ((below_SW + up_SW) * (step_SW << 23).view(torch.float32)).half()


class EmbeddingBags(NamedTuple):
    """The functions of an implementation; see :func:`pool_reference` and the functions after it."""

    pool: Callable[..., None]
    sort: Callable[..., SortedKeys]
    update: Callable[..., None]
    dense_gradient: Callable[..., None]


@torch.no_grad()
def pool_reference(rows_RW: Tensor, ids_NL: Tensor, bags: Bags, out_NBW: Tensor | PeerVectors) -> None:
    """Write the sum of the rows of every bag; 0 for a bag without keys in this store.

    Args:
        rows_RW: the store; fp32 or fp16.
        ids_NL: keys of the samples, integers, contiguous within a sample.
        out_NBW: output of any float dtype: a tensor, of which only the last dimension must be contiguous, or vectors in
            memory of several ranks.

    Raises:
        ValueError: shapes do not match.
    """
    bags.check(ids_NL, out_NBW)
    for number, bag in enumerate(bags.bags):
        out = out_NBW.of_bag(number) if isinstance(out_NBW, PeerVectors) else [out_NBW[:, number]]
        if not bags.rows:
            for part_NW in out:
                part_NW.zero_()
            continue
        key_NH = ids_NL[:, bag.column : bag.column + bag.hotness]
        own_NH = (key_NH >= 0) & (key_NH < bag.rows) & (key_NH % bag.shards == bag.shard)
        row_NH = torch.where(own_NH, bag.base + key_NH // bag.shards, 0)
        vectors_NHW = widen(rows_RW[row_NH]).masked_fill(~own_NH.unsqueeze(2), 0)
        for part_NW, sum_NW in zip(out, vectors_NHW.sum(1).tensor_split(len(out)), strict=True):
            part_NW.copy_(sum_NW)


@torch.no_grad()
def sort_reference(ids_NL: Tensor, bags: Bags) -> SortedKeys:
    """Find the row of every key in every bag, and sort the keys by row.

    Args:
        ids_NL: keys of the samples, integers, contiguous within a sample.

    Raises:
        ValueError: shapes do not match.
    """
    bags.check(ids_NL)
    bag_K, column_K = bags.lookup_K2.long().unbind(1)
    _, _, base_K, rows_K, shard_K, shards_K = bags.table_B6[bag_K].unbind(1)
    key_NK = ids_NL[:, column_K]
    own_NK = (key_NK >= 0) & (key_NK < rows_K) & (key_NK % shards_K == shard_K)
    row_NK = torch.where(own_NK, base_K + key_NK // shards_K, bags.rows)
    row_M, unsorted_M = row_NK.flatten().to(torch.int32).sort(stable=True)
    source_M = unsorted_M // bags.lookups * len(bags) + bag_K[unsorted_M % bags.lookups]
    ours = (row_M < bags.rows).sum(dtype=torch.int32)
    return SortedKeys(row_M, source_M.to(torch.int32), ours, len(bags), bags.rows)


@torch.no_grad()
def update_reference(
    keys: SortedKeys,
    gradient_NBW: Tensor,
    rows_RW: Tensor,
    state_RW: Tensor | None,
    rule: Rule,
    learning_rate: Tensor,
    grad_factor: Tensor,
    write: Tensor,
    rounding_seed: Tensor | None = None,
) -> None:
    """Update each row that has keys once, by the sum of the gradients of its keys.

    Args:
        keys: sorted keys of the batch.
        gradient_NBW: gradients of the vectors of bags, any float dtype; only the last dimension must be contiguous.
            Must be finite if ``write`` is true.
        rows_RW: the store, updated in place; fp32 or fp16; contiguous.
        state_RW: optimizer state, updated in place; fp32; contiguous; None for a rule without state.
        learning_rate: 0-d fp32, on the device.
        grad_factor: factor on the sums, 0-d fp32, on the device.
        write: whether to update rows and state, 0-d bool, on the device.
        rounding_seed: seed of stochastic rounding of fp16 rows, 0-d int64, on the device; None to round to nearest.

    Raises:
        ValueError: shapes, dtypes or strides do not match.
    """
    check_update(keys, gradient_NBW, rows_RW, state_RW, rule)
    if not keys.rows or not len(keys.row_M):
        return
    # There are at least as many slots as runs of equal rows. Slots after the last run with a row in this store repeat
    # it, so that all writes to a row have the same value; if no key has a row, row 0 is written unchanged.
    slots = min(len(keys.row_M), keys.rows + 1)
    new_M = torch.ones_like(keys.row_M, dtype=torch.bool)
    new_M[1:] = keys.row_M[1:] != keys.row_M[:-1]
    run_M = new_M.cumsum(0) - 1
    gradient_MW = widen(gradient_NBW[keys.source_M // keys.bags, keys.source_M % keys.bags])
    sum_SW = gradient_MW.new_zeros((slots, gradient_MW.shape[1])).index_add_(0, run_M, gradient_MW)
    row_S = keys.row_M.new_zeros(slots).scatter_(0, run_M, keys.row_M)
    runs = (new_M & (keys.row_M < keys.rows)).sum()
    slot_S = torch.arange(slots, device=row_S.device).minimum((runs - 1).clamp(min=0))
    row_S = row_S[slot_S].clamp(max=keys.rows - 1).long()
    allowed = write & (runs > 0)

    # in place where possible: on a CPU, allocating memory takes most of the time
    step_SW = sum_SW[slot_S].to(torch.promote_types(sum_SW.dtype, rows_RW.dtype)).mul_(grad_factor)
    if isinstance(rule, AdagradRows):
        assert state_RW is not None  # checked above
        state_SW = state_RW[row_S]
        added_SW = torch.addcmul(state_SW, step_SW, step_SW)
        state_RW.index_copy_(0, row_S, torch.where(allowed, added_SW, state_SW, out=state_SW))
        step_SW.div_(added_SW.sqrt_().add_(rule.epsilon))
    before_SW = rows_RW[row_S]
    after_SW = torch.sub(before_SW, step_SW.mul_(learning_rate), out=step_SW)
    if rounding_seed is not None and rows_RW.dtype == torch.float16:
        after_SW = round_by_chance(after_SW, rounding_seed, row_S)
    rows_RW.index_copy_(0, row_S, torch.where(allowed, after_SW.to(rows_RW.dtype), before_SW, out=before_SW))


@torch.no_grad()
def dense_gradient_reference(keys: SortedKeys, gradient_NBW: Tensor, out_RW: Tensor) -> None:
    """Write the sum of the gradients of the keys of each row; 0 for a row without keys.

    Args:
        keys: sorted keys of the batch.
        gradient_NBW: gradients of the vectors of bags, any float dtype; only the last dimension must be contiguous.
            Values that are not finite may also change the sums of other rows.
        out_RW: output of any float dtype; contiguous.

    Raises:
        ValueError: shapes or strides do not match.
    """
    check_sums(keys, gradient_NBW, out_RW)
    gradient_MW = widen(gradient_NBW[keys.source_M // keys.bags, keys.source_M % keys.bags])
    sum_RW = gradient_MW.new_zeros((keys.rows + 1, gradient_MW.shape[1]))  # the last for keys without a row
    sum_RW.index_add_(0, keys.row_M, gradient_MW)
    out_RW.copy_(sum_RW[:-1])
