"""Launches of the Triton kernels of :mod:`common.ops.embedding_bags.kernels`.

``pool`` is one launch, ``sort`` is two and PyTorch's sort between them, ``update`` is two. There are no atomics.
Shapes: see :mod:`common.ops.embedding_bags.bags`.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from common.ops.embedding_bags import kernels
from common.ops.embedding_bags.bags import (
    AdagradRows,
    Bags,
    PeerVectors,
    Rule,
    SortedKeys,
    check_sums,
    check_update,
)
from common.ops.tile import Tile
from common.ops.triton_support import programs_for

BLOCK = 1024
"""Keys per program of kernels that read no vectors."""

VECTOR = 16
"""Bytes that a thread stores at once."""

NARROWEST = 16
"""Smallest number of columns of a matrix product."""


TILES: dict[str, Tile] = {
    "pool": Tile(samples=4, lookups=2, warps=1),
    "update": Tile(keys=16, warps=4, programs=16, stages=3),
    "long_runs": Tile(partial_sums=16, warps=1, programs=32),
}
"""Tiles by pass.

- ``samples``: samples of one bag per program; ``lookups``: rows of each sample that load at a time;
- ``keys``: keys per tile, at least 16; with more keys, fewer runs cross tiles;
- ``stages`` of ``update``: with 3 stages, the sources, then gradients, rows and state of a tile load while the program
  computes earlier tiles. This is safe because only one tile writes a row;
- ``partial_sums``: partial sums of a run that load at a time.
"""


@torch.no_grad()
def pool(rows_RW: Tensor, ids_NL: Tensor, bags: Bags, out_NBW: Tensor | PeerVectors) -> None:
    """Write the sum of the rows of every bag to ``out_NBW``.

    See :func:`common.ops.embedding_bags.reference.pool_reference`.
    """
    bags.check(ids_NL, out_NBW)
    peers = out_NBW if isinstance(out_NBW, PeerVectors) else None
    out = out_NBW.buffers[0] if isinstance(out_NBW, PeerVectors) else out_NBW
    width = out.shape[-1]
    if rows_RW.shape != (bags.rows, width) or not rows_RW.is_contiguous() or out.stride(-1) != 1:
        raise ValueError(
            f"rows are contiguous ({bags.rows}, {width}) and vectors dense, not {tuple(rows_RW.shape)} and "
            f"{tuple(out.shape)} with strides {rows_RW.stride()} and {out.stride()}"
        )
    if not len(ids_NL):
        return
    tile = TILES["pool"]
    lookups = min(tile.lookups, triton.next_power_of_2(bags.hotness))
    kernels.embedding_pool_kernel[(triton.cdiv(len(ids_NL), tile.samples), len(bags))](
        rows_RW, ids_NL, bags.table_B6, bags.largest_first_B, out,
        peers and peers.address_G, peers and peers.position_B2,
        len(ids_NL), ids_NL.stride(0), out.stride(0), out.stride(1),
        WIDTH=width, BLOCK_W=triton.next_power_of_2(width), SAMPLES=tile.samples, LOOKUPS=lookups,
        PEER_SAMPLES=0 if peers is None else peers.samples, ALIGNMENT=math.gcd(VECTOR, width * out.itemsize),
        num_warps=tile.warps,
    )  # fmt: skip


@torch.no_grad()
def sort(ids_NL: Tensor, bags: Bags) -> SortedKeys:
    """Return the keys of the batch, sorted by row.

    See :func:`common.ops.embedding_bags.reference.sort_reference`. The result is the same. The 32-bit rows are sorted
    with their positions as values. This takes half the passes of 64-bit sort keys that contain row and position.
    """
    bags.check(ids_NL)
    keys = len(ids_NL) * bags.lookups
    row_M = torch.empty(keys, dtype=torch.int32, device=ids_NL.device)
    source_M, ours = torch.empty_like(row_M), torch.zeros((), dtype=torch.int32, device=ids_NL.device)
    if keys:
        kernels.embedding_rows_kernel[(triton.cdiv(keys, BLOCK),)](
            ids_NL, bags.table_B6, bags.lookup_K2, row_M, keys, bags.rows, ids_NL.stride(0),
            LOOKUPS=bags.lookups, BLOCK=BLOCK,
        )  # fmt: skip
        row_M, unsorted_M = row_M.sort(stable=True)
        kernels.embedding_sources_kernel[(triton.cdiv(keys + 1, BLOCK),)](
            row_M, unsorted_M, bags.lookup_K2, source_M, ours, keys, bags.rows,
            BAGS=len(bags), LOOKUPS=bags.lookups, BLOCK=BLOCK,
        )  # fmt: skip
    return SortedKeys(row_M, source_M, ours, len(bags), bags.rows)


@torch.no_grad()
def update(
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
    """Update rows and state in place by the summed gradients of their keys.

    See :func:`common.ops.embedding_bags.reference.update_reference`.
    """
    check_update(keys, gradient_NBW, rows_RW, state_RW, rule)
    if torch.float64 in (rows_RW.dtype, gradient_NBW.dtype):
        raise ValueError(f"the kernels sum in fp32: rows in {rows_RW.dtype}, gradients in {gradient_NBW.dtype}")
    adagrad = isinstance(rule, AdagradRows)
    _add_up(
        keys, gradient_NBW, rows_RW, state_RW, (learning_rate, grad_factor, write),
        rounding_seed if rows_RW.dtype == torch.float16 else None,
        rule.epsilon if isinstance(rule, AdagradRows) else 0.0, kernels.ADAGRAD if adagrad else kernels.SGD,
    )  # fmt: skip


@torch.no_grad()
def dense_gradient(keys: SortedKeys, gradient_NBW: Tensor, out_RW: Tensor) -> None:
    """Write the sum of the gradients of each row's keys to ``out_RW``.

    See :func:`common.ops.embedding_bags.reference.dense_gradient_reference`.
    """
    check_sums(keys, gradient_NBW, out_RW)
    out_RW.zero_()
    _add_up(keys, gradient_NBW, out_RW, None, (None, None, None), None, 0.0, kernels.DENSE)


def _add_up(
    keys: SortedKeys,
    gradient_NBW: Tensor,
    rows_RW: Tensor,
    state_RW: Tensor | None,
    scalars: tuple[Tensor | None, Tensor | None, Tensor | None],
    seed: Tensor | None,
    epsilon: float,
    rule: int,
) -> None:
    """Launch both kernels. ``scalars`` are ``learning_rate``, ``grad_factor`` and ``write``."""
    count, width = len(keys.row_M), rows_RW.shape[1]
    if not keys.rows or not count:
        return
    tile = TILES["update"]
    long_runs = TILES["long_runs"]
    tiles = triton.cdiv(count, tile.keys)
    partial_PW = torch.empty((2 * tiles, width), dtype=torch.float32, device=rows_RW.device)
    constants = {
        "RULE": rule, "WIDTH": width, "BLOCK_W": max(NARROWEST, triton.next_power_of_2(width)), "TILE": tile.keys,
    }  # fmt: skip
    kernels.embedding_update_kernel[(programs_for(tiles, tile.programs, rows_RW.device),)](
        keys.row_M, keys.source_M, keys.ours, gradient_NBW, rows_RW, state_RW, partial_PW, *scalars, seed,
        gradient_NBW.stride(0), gradient_NBW.stride(1), epsilon,
        BAGS=keys.bags, STAGES=tile.stages, num_warps=tile.warps, **constants,
    )  # fmt: skip
    if tiles > 1:
        kernels.embedding_long_runs_kernel[(programs_for(tiles - 1, long_runs.programs, rows_RW.device),)](
            keys.row_M, keys.ours, rows_RW, state_RW, partial_PW, *scalars, seed, epsilon,
            TOGETHER=long_runs.partial_sums, num_warps=long_runs.warps, **constants,
        )  # fmt: skip
