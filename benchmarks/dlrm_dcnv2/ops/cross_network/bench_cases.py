"""The cross network of DLRM-DCNv2, all layers at once, in every implementation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.dlrm_dcnv2.ops import cross_network
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep

LAYERS, INPUTS, RANK = 3, 3456, 512
SAMPLES = 6912
"""Of a micro-batch, an eighth of 55,296."""


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Both directions for ``batch`` samples."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=cases.DEVICE).to(dtype)

    x0, dy = normal(batch, INPUTS), normal(batch, INPUTS)
    v = [(normal(RANK, INPUTS) / INPUTS**0.5).requires_grad_() for _ in range(LAYERS)]
    w = [(normal(INPUTS, RANK) / RANK**0.5).requires_grad_() for _ in range(LAYERS)]
    b = [normal(INPUTS).requires_grad_() for _ in range(LAYERS)]
    unit, narrow = float(x0.numel() * dtype.itemsize), float(batch * RANK * dtype.itemsize)
    flops = 2.0 * LAYERS * batch * 2 * INPUTS * RANK
    # forward: x twice and x0 in, h and y out. Backward: dy, x0, h and dx0 in, dy, dh and dx0 out, but for one that
    # comes last or first; and products read dh twice and x once.
    moved = LAYERS * (5 * unit + 2 * narrow), LAYERS * (10 * unit + 4 * narrow) - unit
    return both_ways(
        lambda: function(x0, v, w, b), [x0.requires_grad_(), *v, *w, *b], [dy], moved=moved, flops=(flops, 2 * flops)
    )


def entries() -> list[Entry]:
    """Every implementation."""
    sizes = {"inputs": INPUTS, "rank": RANK}
    return each("cross_network", cross_network.CROSS_NETWORK, "triton", sizes, case)


def sweeps() -> dict[str, Sweep]:
    """Tiles of the product and of the backward pass."""
    from benchmarks.dlrm_dcnv2.ops.cross_network import triton

    build = functools.partial(case, cross_network.CROSS_NETWORK.function("triton"), SAMPLES)
    shapes = ((128, 128), (128, 256), (256, 128), (128, 64), (64, 128), (64, 256))
    products = [
        (*shape, depth, warps, stages, group)
        for shape, depth, warps, stages, group in itertools.product(shapes, (32, 64), (4, 8), (3, 4), (8,))
    ]
    tiles = list(itertools.product((64, 128), (2048, 4096, 8192), (4, 8), (4, 6, 8, 12), (1, 2)))
    found = {
        f"cross_network product {key}": Sweep(triton.PRODUCT_TILES, key, products, build, key == "backward")
        for key in triton.PRODUCT_TILES
    }
    return found | {"cross_network gradient": Sweep(triton.TILES, "gradient", tiles, build, True)}
