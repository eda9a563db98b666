"""Measure the operations that RetinaNet alone has, at the sizes of its pyramid, on one GPU.

``python -m benchmarks.retinanet.ops.bench`` prints for every pass milliseconds of one call, the bytes that must be
moved and their rate as a share of the copy bandwidth. ``--batches`` are pictures; ``--cases`` limits all to names that
contain one of the given words, and ``--sweep`` times the tiles of our kernels instead. Convolutions, matching and
suppression are measured by ``python -m common.ops.bench``.

Every pass is captured in a CUDA graph of several calls. Cases run in a process of their own, and another one continues
behind a case that failed, hung or crashed: it costs one line.
"""

from __future__ import annotations

from benchmarks.retinanet.ops.focal_loss import bench_cases as focal_loss
from common.ops.bench import command
from common.ops.bench.cases import Entry
from common.ops.bench.sweep import Sweep


def entries() -> list[Entry]:
    """Everything that can be measured."""
    return focal_loss.entries()


def sweeps() -> dict[str, Sweep]:
    """By name: kernel and batch."""
    return focal_loss.sweeps()


if __name__ == "__main__":
    command.main(
        command.Suite("benchmarks.retinanet.ops.bench", __doc__, entries, sweeps, batches="32,4,1", dtype="float16")
    )
