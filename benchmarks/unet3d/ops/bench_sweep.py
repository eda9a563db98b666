"""Tiles of our kernels that :mod:`benchmarks.unet3d.ops.bench` times with ``--sweep``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.unet3d.ops import dice_cross_entropy, instance_norm, output_convolution, upsample
from benchmarks.unet3d.ops.bench_cases import (
    Pass,
    convolution_case,
    failures,
    layers,
    loss_case,
    norm_case,
    output_case,
    upsample_case,
)
from common.distributed.spatial import local
from common.ops.batch_norm_bench import time_graph

BATCHES = (7, 1)
LAYERS = ((32, 128), (64, 64), (128, 32), (256, 16))
SMALL_LAYERS = ((256, 16), (320, 8), (320, 4))
CALLS = 8
_BEST = 3


class Sweep(NamedTuple):
    """Tiles to try for one kernel at one size.

    Attributes:
        table, key: where the kernel's tile stands.
        choices: fields of the tiles.
        build: the passes that run it, for a dtype.
        backward: whether the kernel is one of backward, whose time the second pass holds.
    """

    table: dict[str, Any]
    key: str
    choices: Sequence[tuple[int, ...]]
    build: Callable[[torch.dtype], list[Pass]]
    backward: bool


def sweeps() -> dict[str, Sweep]:
    """By name: kernel, layer and batch."""
    from benchmarks.unet3d.ops import (
        dice_cross_entropy_triton,
        instance_norm_triton,
        output_convolution_triton,
        upsample_triton,
    )
    from common.distributed.spatial import local_triton

    walking: list[tuple[int, ...]] = list(itertools.product((64,), (4096, 8192, 16384), (4, 8), (2, 4), (1, 3)))
    one_each: list[tuple[int, ...]] = list(itertools.product((64, 128), (2048, 4096, 8192), (4, 8), (0,), (1,)))
    tiles = {"moments": walking, "gradient_sums": walking, "normalise": one_each, "input_gradient": one_each}
    voxels = ((64, 2), (128, 4), (256, 4), (256, 8))
    flat = [(*shape, programs, 1) for shape, programs in itertools.product(voxels, (0, 4, 6, 8))]
    staged = [(*shape, *rest) for shape, *rest in itertools.product(voxels, (4, 6, 8), (1, 2, 3))]
    products: list[tuple[int, ...]] = [(64, 128, 64, 4), (128, 64, 64, 4), (64, 64, 64, 4), (32, 128, 64, 4)]
    products += [(128, 128, 64, 4), (128, 128, 64, 8), (64, 256, 64, 8)]
    planes: list[tuple[int, ...]] = list(itertools.product((128, 256, 512, 1024), (4, 8), (0,), (1,)))
    walked = [(*shape, *rest) for shape, *rest in itertools.product(((32, 4), *voxels), (4, 8, 16), (1, 2, 3))]
    # 0 voxels send every volume through the three launches
    small = [(0, 1, 1, 1024), *itertools.product((4096,), (8192, 16384, 32768), (8, 16, 32), (512, 1024, 2048))]
    norm = instance_norm.IMPLEMENTATIONS["triton"].function
    first = local.IMPLEMENTATIONS["triton"].function
    up = upsample.IMPLEMENTATIONS["triton"].function
    output = output_convolution.IMPLEMENTATIONS["triton"].function
    loss = dice_cross_entropy.IMPLEMENTATIONS["triton"].function
    found = {}
    for batch in BATCHES:
        for channels, size in LAYERS:
            build = functools.partial(norm_case, norm, batch, channels=channels, size=size, readers=1)
            for key, choices in tiles.items():
                backward = key in ("gradient_sums", "input_gradient")
                name = f"{key} {channels}@{size} n {batch}"
                found[name] = Sweep(instance_norm_triton.TILES, key, choices, build, backward)
            twice = functools.partial(norm_case, norm, batch, channels=channels, size=size, readers=2)
            for key in ("gradient_sums", "input_gradient"):
                name = f"{key} {channels}@{size} read twice n {batch}"
                found[name] = Sweep(instance_norm_triton.TILES, key, tiles[key], twice, True)
        for channels, size in SMALL_LAYERS:
            build = functools.partial(norm_case, norm, batch, channels=channels, size=size, readers=1)
            for key in ("forward", "backward"):
                name = f"small {key} {channels}@{size} n {batch}"
                found[name] = Sweep(instance_norm_triton.SMALL_TILES, key, small, build, key == "backward")
        for layer in layers():
            if layer.kernel == 2:
                build = functools.partial(upsample_case, up, batch, layer=layer)
                name = layer.name.removesuffix(".transposed")
                found[f"upsample forward {name} n {batch}"] = Sweep(
                    upsample_triton.FORWARD_TILES, "forward", products, build, False
                )
                found[f"upsample backward {name} n {batch}"] = Sweep(
                    upsample_triton.BACKWARD_TILES, "backward", walking, build, True
                )
        build = functools.partial(output_case, output, batch, layer=layers()[-1])
        for key, choices in (("forward", planes), ("backward", walked)):
            name = f"output_convolution {key} n {batch}"
            found[name] = Sweep(output_convolution_triton.TILES, key, choices, build, key == "backward")
        build = functools.partial(convolution_case, first, batch, layer=layers()[0])
        found[f"first conv forward n {batch}"] = Sweep(local_triton.TILES, "forward", flat, build, False)
        found[f"first conv weight n {batch}"] = Sweep(local_triton.TILES, "weight", staged, build, True)
        build = functools.partial(loss_case, loss, batch, memory_format=torch.contiguous_format)
        for key, programs in (("forward", (4, 8, 16)), ("backward", (0,))):
            blocks = list(itertools.product((256, 512, 1024), (4, 8), programs))
            name = f"loss {key} n {batch}"
            found[name] = Sweep(dice_cross_entropy_triton.TILES, key, blocks, build, key == "backward")
    return found


def _milliseconds(run: Callable[[], Any]) -> float:
    def repeat() -> int:
        for _ in range(CALLS):
            run()
        return CALLS

    return time_graph(repeat)


def sweep(name: str, dtype: torch.dtype) -> None:
    """Print the best tiles of one kernel by the time of forward, or of forward and backward, that it is part of."""
    table, key, choices, build, backward = sweeps()[name]
    pass_ = build(dtype)[int(backward)]
    before = table[key]
    times = []
    for choice in dict.fromkeys([tuple(before), *choices]):
        table[key] = type(before)(*choice)
        try:
            times.append((_milliseconds(pass_.run), choice))
        except failures() as reason:  # such as more shared memory than there is
            print(f"    {choice} {str(reason).splitlines()[0]}", flush=True)
    table[key] = before
    now = {choice: ms for ms, choice in times}.get(tuple(before), float("nan"))
    best = ", ".join(f"{choice} {ms:.4f}" for ms, choice in sorted(times)[:_BEST])
    print(f"{name:38s} now {tuple(before)} {now:.4f} ms; best: {best}", flush=True)
