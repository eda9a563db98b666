"""Measure every operation of 3D U-Net at the sizes of each layer on one GPU, and add them up to a step.

``python -m benchmarks.unet3d.ops.bench`` prints for every pass of an operation milliseconds of one call, how many of
them a step has, the bytes that must be moved and their rate as a share of the copy bandwidth, and TFLOP/s where
arithmetic counts. For every batch it ends with what the calls of a step add up to, by kind: a bound for a captured
step, to which reading, optimizer and communication come. ``--batches`` are those of training, ``--evaluation-batches``
windows of an evaluation, which has a forward pass only; ``--cases`` limits all to names that contain one of the given
words, and ``--sweep`` times the tiles of our kernels instead.

Every pass is captured in a CUDA graph of several calls, and cuDNN tries its algorithms before. Cases run in a process
of their own, and another one continues behind a case that failed, hung or crashed: it costs one line.
"""

from __future__ import annotations

from benchmarks.unet3d.ops import convolution_bench_cases as convolution
from benchmarks.unet3d.ops.augment import bench_cases as augment
from benchmarks.unet3d.ops.dice_cross_entropy import bench_cases as dice_cross_entropy
from benchmarks.unet3d.ops.instance_norm import bench_cases as instance_norm
from benchmarks.unet3d.ops.output_convolution import bench_cases as output_convolution
from benchmarks.unet3d.ops.upsample import bench_cases as upsample
from benchmarks.unet3d.ops.window_sums import bench_cases as window_sums
from common.ops.bench import command
from common.ops.bench.cases import Entry
from common.ops.bench.sweep import Sweep

CASES = (convolution, upsample, output_convolution, instance_norm, dice_cross_entropy, augment, window_sums)


def entries() -> list[Entry]:
    """Everything that can be measured, one kind after the other, the network's layers first to last."""
    return [entry for cases in CASES for entry in cases.entries()]


def sweeps() -> dict[str, Sweep]:
    """By name: kernel, layer and batch."""
    return {name: sweep for cases in CASES for name, sweep in cases.sweeps().items()}


if __name__ == "__main__":
    command.main(
        command.Suite(
            "benchmarks.unet3d.ops.bench", __doc__, entries, sweeps, batches="7,1", evaluation_batches="1,4,7"
        )
    )
