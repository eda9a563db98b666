"""Noised latents through the Triton kernel of :mod:`benchmarks.stable_diffusion.ops.noising.kernels`.

Everything is enqueued on the current stream and nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from benchmarks.stable_diffusion.ops.noising import kernels
from benchmarks.stable_diffusion.ops.noising.reference import (
    LARGEST_LOG_VARIANCE,
    SMALLEST_LOG_VARIANCE,
    TIME_INDEX,
    Noised,
    Tables,
    check,
)
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {"noising": Tile(elements=512, warps=4)}
"""Pass to its tile."""


def noised(moments_N2CHW: Tensor, seed: Tensor, sample_ids_N: Tensor, tables: Tables) -> Noised:
    """See :func:`benchmarks.stable_diffusion.ops.noising.reference.noised_reference`. One launch."""
    check(moments_N2CHW, sample_ids_N)
    require_contiguous(moments=moments_N2CHW, sample_ids=sample_ids_N)
    samples, channels, height, width = moments_N2CHW.shape
    channels //= 2
    x_t_NCHW, target_NCHW = (
        torch.empty(
            (samples, channels, height, width), dtype=dtype, device=moments_N2CHW.device,
            memory_format=torch.channels_last,
        )
        for dtype in (tables.dtype, tables.signal_T.dtype)
    )  # fmt: skip
    t_N = sample_ids_N.new_empty(samples, dtype=torch.int64)
    tile, places = TILES["noising"], height * width
    kernels.noising_kernel[triton.cdiv(places * channels, tile.elements), samples](
        moments_N2CHW, seed, sample_ids_N, tables.signal_T, tables.noise_T, x_t_NCHW, target_NCHW, t_N,
        tables.latent_scale, SMALLEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE,
        TIMES=len(tables.signal_T), PLACES=places, CHANNELS=channels, TIME_INDEX=TIME_INDEX,
        BLOCK=tile.elements, num_warps=tile.warps,
    )  # fmt: skip
    return Noised(x_t_NCHW, target_NCHW, t_N)
