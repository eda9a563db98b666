"""Measure the operations that RNN-T alone has, at micro-batches of LibriSpeech's lengths, on one GPU.

``python -m benchmarks.rnnt.ops.bench`` prints for every pass milliseconds of one call, the bytes that must be moved and
their rate as a share of the copy bandwidth, and TFLOP/s where arithmetic counts. ``--batches`` are utterances;
``--cases`` limits all to names that contain one of the given words, and ``--sweep`` times the tiles of our kernels
instead. Where torchaudio is installed, its loss is measured too.
"""

from __future__ import annotations

from benchmarks.rnnt.ops.features import bench_cases as features
from benchmarks.rnnt.ops.joined_dropout import bench_cases as joined_dropout
from benchmarks.rnnt.ops.joint import bench_cases as joint
from benchmarks.rnnt.ops.lstm import bench_cases as lstm
from benchmarks.rnnt.ops.transducer_loss import bench_cases as transducer_loss
from common.ops.bench import command
from common.ops.bench.cases import Entry
from common.ops.bench.sweep import Sweep

_OPERATIONS = (features, lstm, joined_dropout, joint, transducer_loss)


def entries() -> list[Entry]:
    """Everything that can be measured."""
    return [entry for operation in _OPERATIONS for entry in operation.entries()]


def sweeps() -> dict[str, Sweep]:
    """By name: operation and kernel."""
    return {name: sweep for operation in _OPERATIONS for name, sweep in operation.sweeps().items()}


if __name__ == "__main__":
    command.main(
        command.Suite("benchmarks.rnnt.ops.bench", __doc__, entries, sweeps, batches="192,32,8", dtype="float16")
    )
