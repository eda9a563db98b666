"""Every pass of the Triton batch norm over the layers of ResNet-50.

``python -m common.ops.batch_norm.bench_cases`` prints them against the copy bandwidth of the same GPU, and what they
add up to in a step, but for the kernels of a microsecond that finish sums; ``--sweep`` times other tiles. Bytes are
those that a pass must move: each input read once, each output written once. Inputs rotate among sets larger than the
L2 cache together, so no pass profits from the one before it, as it does inside a network.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.ops.bench import cases, command
from common.ops.bench.cases import Entry, Pass, rotating
from common.ops.bench.sweep import Sweep

BATCH = 400
STEM = (64, 112)
STAGES = ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3))
"""Channels inside of the blocks, H = W behind the stride, and blocks; a block ends with four times the channels."""

SWEPT = (STEM, (64, 56), (256, 56), (128, 28), (1024, 14), (2048, 7))
"""Channels and H = W at which tiles are tried, if the pass runs there."""


class Inputs:
    """One set of tensors for all passes: rows N * H * W of C channels, channels_last."""

    def __init__(self, batch: int, channels: int, size: int, dtype: torch.dtype) -> None:
        def random() -> Tensor:
            shape = (batch, channels, size, size)
            return torch.empty(shape, device=cases.DEVICE, dtype=dtype, memory_format=torch.channels_last).normal_()

        self.x, self.dy, self.residual, self.other_dy = (random() for _ in range(4))
        self.statistics = torch.rand(5, channels, device=cases.DEVICE)
        self.coefficients = torch.rand(3, channels, device=cases.DEVICE)
        self.bits = torch.randint(256, (batch * size * size, channels // 8), device=cases.DEVICE, dtype=torch.uint8)
        pooled = (self.x[:, :, : size // 2, : size // 2], self.dy[:, :, : size // 2, : size // 2])
        self.source, self.pooled_dy = (tensor.contiguous(memory_format=torch.channels_last) for tensor in pooled)
        self.place = torch.randint_like(self.pooled_dy, 10, dtype=torch.int8)


class Work(NamedTuple):
    """A pass.

    Attributes:
        tensors: of (M, C) that it reads and writes in 16-bit types.
        launch: enqueues it.
    """

    tensors: float
    launch: Callable[[Inputs], object]


def works() -> dict[str, Work]:
    """Every pass, by the name of its tile but for ``gradient_sums_pool``, which has that of ``gradient_sums``."""
    from common.ops.batch_norm import pool_triton as bn_pool
    from common.ops.batch_norm import triton as bn

    def sums(i: Inputs, *residual: Tensor) -> object:
        return bn.gradient_sums(i.dy, i.other_dy, i.x, i.statistics, True, i.bits, *residual)

    bits = 1 / 16
    return {
        "moments": Work(1, lambda i: bn.partial_moments(i.x)),
        "normalise": Work(2, lambda i: bn.normalise(i.x, i.statistics, True)),
        "normalise_add": Work(3 + bits, lambda i: bn.normalise(i.x, i.statistics, True, i.residual)),
        "normalise_dual": Work(3 + bits, lambda i: bn.normalise(i.x, i.statistics, True, i.residual, i.statistics)),
        "gradient_sums": Work(2, lambda i: bn.gradient_sums(i.dy, None, i.x, i.statistics, True)),
        "gradient_sums_add": Work(4 + bits, sums),
        "gradient_sums_dual": Work(5 + bits, lambda i: sums(i, i.residual, i.statistics)),
        "gradient_sums_pool": Work(2 / 4, lambda i: bn.gradient_sums(i.pooled_dy, None, i.source, i.statistics, True)),
        "input_gradient": Work(3, lambda i: bn.input_gradient(i.dy, i.x, i.statistics, i.coefficients, True)),
        "input_gradient_add": Work(3, lambda i: bn.input_gradient(i.dy, i.x, i.statistics, i.coefficients, False)),
        "input_gradient_dual": Work(
            5,
            lambda i: bn.input_gradient(i.dy, i.x, i.statistics, i.coefficients, False, i.residual, i.coefficients),
        ),
        "pool": Work(1 + 5 / 8, lambda i: bn_pool.pool(i.x, i.statistics)),
        "pool_gradient": Work(2 + 3 / 8, lambda i: bn_pool.pool_gradient(i.pooled_dy, i.place, i.x, i.coefficients)),
    }


KINDS: dict[str, tuple[str, ...]] = {
    "relu": ("moments", "normalise", "gradient_sums", "input_gradient"),
    "add": ("moments", "normalise_add", "gradient_sums_add", "input_gradient_add"),
    "dual": ("moments", "normalise_dual", "gradient_sums_dual", "input_gradient_dual"),
    "projection": ("moments",),
    "pool": ("moments", "pool", "gradient_sums_pool", "pool_gradient"),
}
"""What follows a norm to its passes; ``dual`` has those of the projection's norm but its moments."""


def norms() -> Counter[tuple[str, int, int]]:
    """Kind, channels and size of the norms of ResNet-50, and how many a step has; 0 of those to compare with."""
    found = Counter({("pool", *STEM): 1, ("relu", *STEM): 0})
    before = STAGES[0][1]
    for width, size, blocks in STAGES:
        end = (4 * width, size)
        found["relu", width, before] += 1
        found["relu", width, size] += 2 * blocks - 1
        found |= Counter({("dual", *end): 1, ("projection", *end): 1, ("add", *end): blocks - 1})
        found["relu", *end] = 0
        before = size
    return found


def case(batch: int, dtype: torch.dtype, *, kind: str, channels: int, size: int) -> list[Pass]:
    """The passes of a norm."""
    elements = batch * channels * size * size
    sets = rotating(lambda: Inputs(batch, channels, size, dtype), elements * dtype.itemsize)

    def timed(name: str) -> Pass:
        work = works()[name]
        direction = name.removesuffix(f"_{kind}").replace("_", " ")
        return Pass(direction, lambda: work.launch(next(sets)), work.tensors * elements * dtype.itemsize)

    return [timed(name) for name in KINDS[kind]]


def entries() -> list[Entry]:
    """Every norm."""
    return [
        Entry(
            f"norm {kind} {channels} x {size}",
            calls,
            functools.partial(case, kind=kind, channels=channels, size=size),
        )
        for (kind, channels, size), calls in norms().items()
    ]


def tiles(name: str, channels: int) -> Iterator[tuple[int, ...]]:
    """Tiles to try for a pass over so many channels."""
    if name.startswith("pool"):
        for pixels, rest in itertools.product((16, 32, 64), ((32, 2), (32, 4), (64, 2), (64, 4), (64, 8))):
            yield pixels, *rest
        return
    reduces = name.startswith(("moments", "gradient_sums"))
    columns = [count for count in (64, 128, 256, 512) if count <= max(64, channels)]
    shapes = ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 4))
    for count, shape, stages in itertools.product(columns, shapes, (1, 3)):
        for programs in (2, 4, 8) if reduces else (0, 4, 8):
            if programs or stages == 1:
                yield count, *shape, programs, stages


def sweeps() -> dict[str, Sweep]:
    """Every tile, at the sizes where its pass runs."""
    from common.ops.batch_norm import pool_triton as bn_pool
    from common.ops.batch_norm import triton as bn

    found = {}
    for kind, channels, size in norms():
        for place, name in enumerate(KINDS[kind]):
            table: dict[str, Any] = bn_pool.TILES if name in bn_pool.TILES else bn.TILES
            if name in table and (channels, size) in SWEPT:
                build = functools.partial(_one, place, kind=kind, channels=channels, size=size)
                tried = Sweep(table, name, list(tiles(name, channels)), build, backward=False)
                found[f"{name} {channels} x {size}"] = tried
    return found


def _one(place: int, dtype: torch.dtype, **size: Any) -> list[Pass]:
    """A single pass of a norm."""
    return [case(BATCH, dtype, **size)[place]]


if __name__ == "__main__":
    command.main(
        command.Suite(
            "common.ops.batch_norm.bench_cases", __doc__, entries, sweeps, batches=str(BATCH), dtype="float16"
        )
    )
