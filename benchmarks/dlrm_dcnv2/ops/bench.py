"""Measure the operations that DLRM-DCNv2 alone has, on one GPU.

``python -m benchmarks.dlrm_dcnv2.ops.bench`` prints for every pass milliseconds of one call, the bytes that must be
moved and their rate as a share of the copy bandwidth, and TFLOP/s. ``--batches`` are samples of a micro-batch;
``--cases`` limits all to names that contain one of the given words, and ``--sweep`` times the tiles of our kernels
instead.

Every pass is captured in a CUDA graph of several calls. Cases run in a process of their own, and another one continues
behind a case that failed, hung or crashed: it costs one line.
"""

from __future__ import annotations

from benchmarks.dlrm_dcnv2.ops.cross_network import bench_cases as cross_network
from common.ops.bench import command

if __name__ == "__main__":
    command.main(
        command.Suite(
            "benchmarks.dlrm_dcnv2.ops.bench",
            __doc__,
            cross_network.entries,
            cross_network.sweeps,
            batches=str(cross_network.SAMPLES),
        )
    )
