"""Sampling through the Triton kernels of :mod:`benchmarks.maskrcnn.ops.sampling.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: B pictures, N candidates, C of a
sample.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from benchmarks.maskrcnn.ops.sampling import kernels
from benchmarks.maskrcnn.ops.sampling.reference import Sample, check_counts
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

DIGITS = ((21, 11), (10, 11), (0, 10))
"""Of a key from the highest: shift and bits."""


TILES: dict[str, Tile] = {
    "count": Tile(rows=1024, warps=4),
    "digit": Tile(rows=1, warps=4),
    "collect": Tile(rows=1024, warps=4),
    "order": Tile(rows=32, warps=4),
}
"""Pass to its tile; all bins of a digit are one program's."""


@torch.no_grad()
def sample(label_BN: Tensor, seed: Tensor, stream: int, count: int, most_positive: int) -> Sample:
    """See :func:`benchmarks.maskrcnn.ops.sampling.reference.sample_reference`, whose sample this is.

    Raises:
        ValueError: labels that aren't contiguous, or ``most_positive`` is larger than ``count``.
    """
    check_counts(count, most_positive)
    require_contiguous(label_BN=label_BN)
    pictures, candidates = label_BN.shape
    device = label_BN.device
    index_BC = torch.zeros((pictures, count), dtype=torch.int64, device=device)
    taken_B2 = torch.zeros((pictures, 2), dtype=torch.int64, device=device)
    if index_BC.numel() and candidates:
        bins = torch.zeros((len(DIGITS), pictures, 2, int(kernels.BINS.value)), dtype=torch.int32, device=device)
        largest_B2 = torch.empty_like(taken_B2)
        left_B2 = torch.empty((pictures, 2), dtype=torch.int32, device=device)
        tile = TILES["count"]
        for place, (shift, bits) in enumerate(DIGITS):
            kernels.sampling_count_kernel[(triton.cdiv(candidates, tile.rows), pictures)](
                label_BN, seed, largest_B2, bins[place], candidates, stream,
                SHIFT=shift, BITS=bits, BLOCK=tile.rows, num_warps=tile.warps,
            )  # fmt: skip
            kernels.sampling_digit_kernel[(pictures,)](
                bins[place], largest_B2, left_B2, taken_B2, count, most_positive,
                FIRST=place == 0, BITS=bits, num_warps=TILES["digit"].warps,
            )  # fmt: skip
        tile = TILES["collect"]
        found_B2 = torch.zeros_like(left_B2)
        keys_BC = torch.empty_like(index_BC)
        candidates_BC = torch.empty((pictures, count), dtype=torch.int32, device=device)
        kernels.sampling_collect_kernel[(triton.cdiv(candidates, tile.rows), pictures)](
            label_BN, seed, largest_B2, found_B2, taken_B2, keys_BC, candidates_BC, candidates, stream, count,
            BLOCK=tile.rows, num_warps=tile.warps,
        )  # fmt: skip
        tile = TILES["order"]
        kernels.sampling_order_kernel[(triton.cdiv(count, tile.rows), pictures)](
            taken_B2, keys_BC, candidates_BC, index_BC, count,
            SLOTS=triton.next_power_of_2(count), ROWS=tile.rows, num_warps=tile.warps,
        )  # fmt: skip
    return Sample(index_BC, taken_B2[:, 0], taken_B2[:, 1])
