"""Measure the operations that R-GAT alone has, at the sizes of a sample of IGBH, on one GPU.

``python -m benchmarks.rgat.ops.bench`` prints for every pass milliseconds of one call, the bytes that must be moved and
their rate as a share of the copy bandwidth, and TFLOP/s where arithmetic counts. ``--batches`` are seeds of a
micro-batch; ``--cases`` limits all to names that contain one of the given words, and ``--sweep`` times the tiles of our
kernels instead.

Every pass is captured in a CUDA graph of several calls. Cases run in a process of their own, and another one continues
behind a case that failed, hung or crashed: it costs one line.
"""

from __future__ import annotations

from benchmarks.rgat.ops.edge_attention import bench_cases as edge_attention
from benchmarks.rgat.ops.gather_rows import bench_cases as gather_rows
from benchmarks.rgat.ops.projection import bench_cases as projection
from benchmarks.rgat.ops.sample import bench_cases as sample
from common.ops.bench import command
from common.ops.bench.cases import Entry
from common.ops.bench.sweep import Sweep

CASES = (sample, gather_rows, projection, edge_attention)
"""The ``bench_cases`` of every operation: each has ``entries`` and ``sweeps``."""


def entries() -> list[Entry]:
    """Everything that can be measured."""
    return [entry for cases in CASES for entry in cases.entries()]


def sweeps() -> dict[str, Sweep]:
    """By name: kernel, and where it is tried at several sizes which."""
    return {name: sweep for cases in CASES for name, sweep in cases.sweeps().items()}


if __name__ == "__main__":
    command.main(command.Suite("benchmarks.rgat.ops.bench", __doc__, entries, sweeps, batches="2048,1024"))
