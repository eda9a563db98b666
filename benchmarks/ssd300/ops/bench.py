"""Measure the operation that SSD300 alone has, at the sizes of its levels, on one GPU.

``python -m benchmarks.ssd300.ops.bench`` prints for every pass milliseconds of one call, the bytes that must be moved
and their rate as a share of the copy bandwidth. ``--batches`` are pictures; ``--sweep`` times the tiles of our kernels
instead. Matching and suppression are measured by ``python -m common.ops.bench``, at RetinaNet's sizes.
"""

from __future__ import annotations

from benchmarks.ssd300.ops.class_entropy import bench_cases as class_entropy
from common.ops.bench import command
from common.ops.bench.cases import Entry
from common.ops.bench.sweep import Sweep


def entries() -> list[Entry]:
    """Everything that can be measured."""
    return class_entropy.entries()


def sweeps() -> dict[str, Sweep]:
    """By name: kernel and batch."""
    return class_entropy.sweeps()


if __name__ == "__main__":
    command.main(
        command.Suite("benchmarks.ssd300.ops.bench", __doc__, entries, sweeps, batches="114,24,3", dtype="float16")
    )
