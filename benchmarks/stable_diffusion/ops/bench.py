"""Measure the operations that Stable Diffusion alone has, noising and loss, on one GPU.

``python -m benchmarks.stable_diffusion.ops.bench`` prints for every pass milliseconds of one call, the bytes that must
be moved and their rate as a share of the copy bandwidth. ``--batches`` are pictures; ``--cases`` limits all to names
that contain one of the given words, and ``--sweep`` times the tiles of our kernels instead. Attention, norms and
convolutions are measured by ``python -m common.ops.bench``.

Every pass is captured in a CUDA graph of several calls. Cases run in a process of their own, and another one continues
behind a case that failed, hung or crashed: it costs one line.
"""

from __future__ import annotations

from benchmarks.stable_diffusion.ops.noising import bench_cases as noising
from benchmarks.stable_diffusion.ops.velocity_loss import bench_cases as velocity_loss
from common.ops.bench import command
from common.ops.bench.cases import Entry
from common.ops.bench.sweep import Sweep


def entries() -> list[Entry]:
    """Everything that can be measured."""
    return [*noising.entries(), *velocity_loss.entries()]


def sweeps() -> dict[str, Sweep]:
    """By name: kernel and batch."""
    return {**noising.sweeps(), **velocity_loss.sweeps()}


if __name__ == "__main__":
    command.main(
        command.Suite("benchmarks.stable_diffusion.ops.bench", __doc__, entries, sweeps, "32,2", dtype="float16")
    )
