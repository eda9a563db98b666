"""The norms behind the convolutions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.unet3d.ops import instance_norm
from benchmarks.unet3d.ops.bench_layers import BATCHES, FACTS, norms, volumes
from benchmarks.unet3d.ops.instance_norm.reference import instance_norm_relu_reference
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep

HELD_VOXELS = 16**3
"""Voxels of an instance up to which a norm reads its input once."""

LAYERS = ((32, 128), (64, 64), (128, 32), (256, 16))
SMALL_LAYERS = ((256, 16), (320, 8), (320, 4))
"""Channels and size, at which tiles are tried."""


def case(
    function: Callable[..., tuple[Tensor, Tensor]],
    batch: int,
    dtype: torch.dtype,
    *,
    channels: int,
    size: int,
    readers: int,
) -> list[Pass]:
    """With fp32 parameters; the second reader's gradient is a part of that of joined channels.

    The input of a norm whose instances no multiprocessor can hold is read twice in each direction, its gradients too.
    """
    x = volumes(batch, channels, size, dtype).requires_grad_()
    dy = [volumes(batch, channels, size, dtype), volumes(batch, 2 * channels, size, dtype)[:, channels:]][:readers]
    weight = torch.ones(channels, device=cases.DEVICE, requires_grad=True)
    bias = torch.zeros(channels, device=cases.DEVICE, requires_grad=True)
    unit = float(x.numel() * dtype.itemsize)
    held = size**3 <= HELD_VOXELS
    return both_ways(
        lambda: function(x, weight, bias, FACTS.norm_epsilon)[:readers],
        [x, weight, bias],
        dy,
        moved=((2 if held else 3) * unit, (2 + readers if held else 3 + 2 * readers) * unit),
    )


def entries() -> list[Entry]:
    """Every norm in every implementation, and the first as the compiler makes it, which takes seconds for each."""
    found = []
    for (channels, size, readers), count in norms().items():
        build = functools.partial(case, channels=channels, size=size, readers=readers)
        name = f"norm {channels}@{size}{' read twice' if readers == 2 else ''}"
        found += each(name, instance_norm.INSTANCE_NORM, "triton", {"channels": channels}, build, count)
    channels, size, readers = next(iter(norms()))
    build = functools.partial(case, channels=channels, size=size, readers=readers)
    compiled = torch.compile(instance_norm_relu_reference, dynamic=False)
    return [*found, Entry(f"norm {channels}@{size} compiled", 0, functools.partial(build, compiled))]


def sweeps() -> dict[str, Sweep]:
    """Tiles of the launches of large volumes, and of those of small ones."""
    from benchmarks.unet3d.ops.instance_norm import triton

    walking: list[tuple[int, ...]] = list(itertools.product((64,), (4096, 8192, 16384), (4, 8), (2, 4), (1, 3)))
    one_each: list[tuple[int, ...]] = list(itertools.product((64, 128), (2048, 4096, 8192), (4, 8), (0,), (1,)))
    tiles = {"moments": walking, "gradient_sums": walking, "normalise": one_each, "input_gradient": one_each}
    # 0 voxels send every volume through the three launches
    small = [(0, 1, 1, 1024), *itertools.product((4096,), (8192, 16384, 32768), (8, 16, 32), (512, 1024, 2048))]
    build = functools.partial(case, instance_norm.INSTANCE_NORM.function("triton"))
    found = {}
    for batch in BATCHES:
        for channels, size in LAYERS:
            once = functools.partial(build, batch, channels=channels, size=size, readers=1)
            for key, choices in tiles.items():
                backward = key in ("gradient_sums", "input_gradient")
                found[f"{key} {channels}@{size} n {batch}"] = Sweep(triton.TILES, key, choices, once, backward)
            twice = functools.partial(build, batch, channels=channels, size=size, readers=2)
            for key in ("gradient_sums", "input_gradient"):
                name = f"{key} {channels}@{size} read twice n {batch}"
                found[name] = Sweep(triton.TILES, key, tiles[key], twice, True)
        for channels, size in SMALL_LAYERS:
            once = functools.partial(build, batch, channels=channels, size=size, readers=1)
            for key in ("forward", "backward"):
                name = f"small {key} {channels}@{size} n {batch}"
                found[name] = Sweep(triton.SMALL_TILES, key, small, once, key == "backward")
    return found
