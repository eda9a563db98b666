"""Measure every pass of the Triton batch norm against the copy bandwidth of the same GPU.

``python -m common.ops.batch_norm.bench`` prints GB/s and percent of copy bandwidth for ResNet-50's layers;
``--sweep FILE`` tries many tiles for each pass, prints the best ones and writes all times to FILE (JSON).
Bytes are those that a pass must move: each input read once, each output written once. Inputs rotate among sets larger
than the L2 cache together, so no pass profits from the one before it, as it does inside a network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from common.ops.batch_norm import pool_triton as bn_pool
from common.ops.batch_norm import triton as bn
from common.ops.bench.stopwatch import copy_bandwidth, time_graph
from common.ops.tiling.tiles import Tile

LAYERS = ((64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7))
"""(C, H = W) of ResNet-50's convolution outputs."""

STEM = (64, 112)
BLOCK_ENDS = ((256, 56), (512, 28), (1024, 14), (2048, 7))
SWEEP_LAYERS = (STEM, (64, 56), (256, 56), (128, 28), (1024, 14), (2048, 7))
ROTATED_BYTES = 400e6
COMPILE_PROCESSES = 14


class Inputs:
    """One set of tensors for all passes: rows N * H * W of C channels, channels_last."""

    def __init__(self, batch: int, channels: int, size: int, dtype: torch.dtype) -> None:
        device = torch.device("cuda")

        def random() -> Tensor:
            shape = (batch, channels, size, size)
            return torch.empty(shape, device=device, dtype=dtype, memory_format=torch.channels_last).normal_()

        self.x, self.dy, self.residual = random(), random(), random()
        self.other_dy = random() if (channels, size) in BLOCK_ENDS else self.residual
        self.statistics = torch.rand(5, channels, device=device)
        self.coefficients = torch.rand(3, channels, device=device)
        rows = batch * size * size
        self.pooled_dy = random()[:, :, : size // 2, : size // 2].contiguous(memory_format=torch.channels_last)
        self.place = torch.randint_like(self.pooled_dy, 10, dtype=torch.int8)
        self.bits = torch.randint(0, 256, (rows, channels // 8), device=device, dtype=torch.uint8)


PASSES: dict[str, tuple[float, Callable[[Inputs], object]]] = {
    "moments": (1, lambda i: bn.partial_moments(i.x)),
    "normalise": (2, lambda i: bn.normalise(i.x, i.statistics, True)),
    "normalise_add": (3 + 1 / 16, lambda i: bn.normalise(i.x, i.statistics, True, i.residual)),
    "normalise_dual": (3 + 1 / 16, lambda i: bn.normalise(i.x, i.statistics, True, i.residual, i.statistics)),
    "gradient_sums": (2, lambda i: bn.gradient_sums(i.dy, None, i.x, i.statistics, True)),
    "gradient_sums_add": (
        4 + 1 / 16,
        lambda i: bn.gradient_sums(i.dy, i.other_dy, i.x, i.statistics, True, i.bits),
    ),
    "gradient_sums_dual": (
        5 + 1 / 16,
        lambda i: bn.gradient_sums(i.dy, i.other_dy, i.x, i.statistics, True, i.bits, i.residual, i.statistics),
    ),
    "input_gradient": (3, lambda i: bn.input_gradient(i.dy, i.x, i.statistics, i.coefficients, True)),
    "input_gradient_dual": (
        5,
        lambda i: bn.input_gradient(i.dy, i.x, i.statistics, i.coefficients, False, i.residual, i.coefficients),
    ),
    "pool": (1 + 5 / 8, lambda i: bn_pool.pool(i.x, i.statistics)),
    "pool_gradient": (2 + 3 / 8, lambda i: bn_pool.pool_gradient(i.pooled_dy, i.place, i.x, i.coefficients)),
}
"""Pass to the tensors of (M, C) that it reads and writes in 16-bit types, and its launch."""


def measure(name: str, sets: list[Inputs]) -> tuple[float, float]:
    """Milliseconds and bytes per second of one pass."""
    tensors, launch = PASSES[name]

    def launches() -> int:
        count = max(len(sets), 4)
        for inputs, _ in zip(itertools.cycle(sets), range(count)):
            launch(inputs)
        return count

    time_ms = time_graph(launches)
    return time_ms, tensors * sets[0].x.numel() * sets[0].x.element_size() / (time_ms * 1e-3)


def rotation(batch: int, channels: int, size: int, dtype: torch.dtype) -> list[Inputs]:
    """Enough sets of inputs to spill the L2 cache between launches."""
    first = Inputs(batch, channels, size, dtype)
    more = int(ROTATED_BYTES // (first.x.numel() * first.x.element_size()))
    return [first] + [Inputs(batch, channels, size, dtype) for _ in range(more)]


def applies(name: str, channels: int, size: int) -> bool:
    """Whether the network runs a pass over a layer."""
    if name.startswith("pool"):
        return (channels, size) == STEM
    return (channels, size) in BLOCK_ENDS or not name.endswith(("add", "dual"))


def tiles(name: str) -> Iterator[Tile | bn_pool.PoolTile]:
    """The tiles that a sweep tries for a pass."""
    if name.startswith("pool"):
        for pixels, (channels, warps) in itertools.product((16, 32, 64), ((32, 2), (32, 4), (64, 2), (64, 4), (64, 8))):
            yield bn_pool.PoolTile(pixels, channels, warps)
        return
    reduces = name.startswith(("moments", "gradient_sums"))
    for columns, (elements, warps), stages in itertools.product(
        (64, 128, 256, 512), ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 4)), (1, 3)
    ):
        for programs in (2, 4, 8) if reduces else (0, 4, 8):
            if programs or stages == 1:
                yield Tile(columns, elements, warps, programs, stages)


def use(name: str, tile: Tile | bn_pool.PoolTile) -> None:
    """Let a pass run with ``tile``."""
    if isinstance(tile, Tile):
        bn.TILES[name] = tile
    else:
        bn_pool.TILES[name] = tile


def compile_share(index: int, dtype: torch.dtype, names: list[str]) -> None:
    """Compile every ``COMPILE_PROCESSES``-th tile of the sweep into Triton's cache."""
    inputs = Inputs(256, 512, 8, dtype)
    jobs = [(name, tile) for name in names for tile in tiles(name)]
    for name, tile in jobs[index::COMPILE_PROCESSES]:
        use(name, tile)
        PASSES[name][1](inputs)
    torch.cuda.synchronize()


def sweep(batch: int, dtype: torch.dtype, path: str, peak: float, names: list[str]) -> None:
    """Time every tile of the named passes and print the best."""
    command = [sys.executable, "-m", "common.ops.batch_norm.bench", "--dtype", str(dtype).removeprefix("torch.")]
    command += ["--passes", ",".join(names), "--compile"]
    workers = [subprocess.Popen([*command, str(index)]) for index in range(COMPILE_PROCESSES)]
    for worker in workers:
        worker.wait()
    rows: list[tuple[str, int, int, tuple[int, ...], float]] = []
    for channels, size in SWEEP_LAYERS:
        chosen = [name for name in names if applies(name, channels, size)]
        sets = rotation(batch, channels, size, dtype) if chosen else []
        for name in chosen:
            for tile in tiles(name):
                if not isinstance(tile, Tile) or tile.columns <= max(64, channels):
                    use(name, tile)
                    rows.append((name, channels, size, tuple(tile), measure(name, sets)[1] / peak))
            best = sorted((row for row in rows if row[:3] == (name, channels, size)), key=lambda row: -row[4])[:4]
            print(name, channels, size, *(f"{row[3]} {row[4]:.1%}" for row in best), sep="  ", flush=True)
        del sets
    with open(path, "w") as file:
        json.dump(rows, file)


def table(batch: int, dtype: torch.dtype, peak: float, names: list[str]) -> None:
    """Print each pass over each layer with the tiles in use."""
    for channels, size in LAYERS:
        sets = rotation(batch, channels, size, dtype)
        cells = []
        for name in names:
            if applies(name, channels, size):
                time_ms, rate = measure(name, sets)
                cells.append(f"{name} {time_ms * 1e3:.0f}us {rate / 1e9:.0f} {rate / peak:.0%}")
        print(f"({batch},{channels},{size},{size})", *cells, sep="  ", flush=True)
        del sets


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=400)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--sweep", metavar="FILE")
    parser.add_argument("--passes", default=",".join(PASSES), help="comma-separated; default: all")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    names = arguments.passes.split(",")
    if arguments.compile is not None:
        compile_share(arguments.compile, dtype, names)
        return
    peak = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {dtype}: copy {peak / 1e9:.0f} GB/s")
    if arguments.sweep:
        sweep(arguments.batch, dtype, arguments.sweep, peak, names)
    else:
        table(arguments.batch, dtype, peak, names)


if __name__ == "__main__":
    main()
