"""Measure the operations that Mask R-CNN alone has, at 12 pictures of 800 x 1344 px, on one GPU.

``python -m benchmarks.maskrcnn.ops.bench`` prints for every pass milliseconds of one call, the bytes that must be moved
and their rate as a share of the copy bandwidth. ``--batches`` are pictures; ``--cases`` limits all to names that
contain one of the given words, and ``--sweep`` times the tiles of our kernels instead. Convolutions, matching and
suppression are measured by ``python -m common.ops.bench``.
"""

from __future__ import annotations

from benchmarks.maskrcnn.ops.mask_targets import bench_cases as mask_targets
from benchmarks.maskrcnn.ops.paste import bench_cases as paste
from benchmarks.maskrcnn.ops.resize import bench_cases as resize
from benchmarks.maskrcnn.ops.roi_align import bench_cases as roi_align
from benchmarks.maskrcnn.ops.sampling import bench_cases as sampling
from benchmarks.maskrcnn.ops.selected_logits import bench_cases as selected_logits
from common.ops.bench import command
from common.ops.bench.cases import Entry
from common.ops.bench.sweep import Sweep

_OPERATIONS = (resize, roi_align, selected_logits, sampling, mask_targets, paste)


def entries() -> list[Entry]:
    """Everything that can be measured."""
    return [entry for operation in _OPERATIONS for entry in operation.entries()]


def sweeps() -> dict[str, Sweep]:
    """By name: kernel and batch."""
    return {name: sweep for operation in _OPERATIONS for name, sweep in operation.sweeps().items()}


if __name__ == "__main__":
    command.main(
        command.Suite("benchmarks.maskrcnn.ops.bench", __doc__, entries, sweeps, batches="12,4,1", dtype="bfloat16")
    )
