"""Training and validation data of FLUX.1: batches of encodings, read in place from the published files.

A training batch has, in bf16, ``t5`` (N, T, K), ``clip`` (N, P), ``mean`` and ``logvar`` (N, C, H, W), and
``sample_ids`` int64 (N,), which count samples over the whole training. A dropped sample has the encodings of the
empty caption; whether a sample is dropped is a function of seed and id.

A validation batch has the same tensors without dropout, where ``sample_ids`` are rows of the validation set;
``timesteps`` int64 (N,) in 0 to 7; and ``present`` bool (N,), which is False for padding, whose other values are 0.

The order is that of the reference: every rank reads its own contiguous share of the stored order repeatedly.
Here, a share belongs to a micro-batch of the global batch, so N replicas see the same data as one that accumulates N.

A sample has 2.2 MB, so eight GPUs that train on 60 samples per second read 1 GB/s, in pieces of 2 MB from a few files
in sequence.

Legend: N samples of a batch; the others as in :mod:`benchmarks.flux1.encodings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.flux1.config import FluxConfig
from benchmarks.flux1.encodings import REMEDY, SPLITS, EncodingSizes, read_empty, read_manifest, require_timesteps
from common.data.batches import DataSource, EvalSource
from common.data.contiguous_shares import ContiguousShares
from common.data.indexed_arrays import INDEX, ArrayBatches, open_index
from common.data.manifest import Manifest
from common.data.order import EvalShard, MicroBatches, sample_generator
from common.data.threads import PendingBatch, ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout

_VERIFY = "check the data with 'mlperf-suite verify benchmark=flux1 --data-dir DATA'"
_DROPOUT = 4
"""Second number of a generator's key; :mod:`common.data.order` uses 3."""


def is_dropped(seed: int, sample_id: int, probability: float) -> bool:
    """Return whether a training sample has the encodings of the empty caption."""
    return bool(sample_generator(seed, _DROPOUT, sample_id).random() < probability)


def open_train(
    root: Path, own: FluxConfig, layout: Layout, micro_batch: int, grad_accumulation_steps: int
) -> DataSource:
    """Open the training data under ``root`` for this rank; call it after ``run_start``.

    Raises:
        DataError: the folder is incomplete or has encodings of other sizes. While reading: a file is damaged.
        ConfigError: there are fewer samples than micro-batches of a global batch.
    """
    sizes, dropout = EncodingSizes.of(own.facts), own.facts.text_dropout
    found = read_manifest(root, sizes)
    mine = MicroBatches(micro_batch, grad_accumulation_steps, layout.size("dp"), layout.index("dp"))
    stream = ContiguousShares(mine, found.counts["train_samples"])
    most_open = 2 * grad_accumulation_steps  # each micro-batch of a step reads another share, at most two files of it
    batches = _open(root, found, "train", own, layout, most_open)
    empty = read_empty(root, sizes, REMEDY)

    def begin(number: int) -> PendingBatch:
        ids = range(stream.first_id(number), stream.first_id(number) + micro_batch)
        replaced = [empty if is_dropped(layout.seed, sample, dropout) else {} for sample in ids]
        rows = [sample for _, sample in stream.samples_of(number)]
        return batches.begin(rows, micro_batch, {"sample_ids": torch.tensor(ids)}, replaced)

    return ThreadedTrainSource(
        stream, found.counts["eval_samples"], found.synthetic, batches.threads, begin, batches.close
    )


def open_eval(root: Path, own: FluxConfig, layout: Layout) -> EvalSource:
    """Open the validation data under ``root`` for this rank, after ``run_start``.

    Every replica has a contiguous part of the set.

    Raises:
        DataError: as :func:`open_train`; or not every timestep of ``benchmark.facts`` has samples.
    """
    found, slots = read_manifest(root, EncodingSizes.of(own.facts)), own.reader.eval_batch
    shard = EvalShard(found.counts["eval_samples"], slots, layout.size("dp"), layout.index("dp"))
    batches = _open(root, found, "eval", own, layout, 0)
    assert batches.arrays.integers_S is not None
    require_timesteps(batches.arrays.integers_S, own.facts.eval_timesteps, root / SPLITS["eval"] / INDEX)
    timesteps_S = torch.from_numpy(batches.arrays.integers_S)

    def begin(samples: Sequence[int]) -> PendingBatch:
        others = {name: torch.zeros(slots, dtype=torch.int64) for name in ("sample_ids", "timesteps")}
        others["sample_ids"][: len(samples)] = torch.tensor(samples)
        others["timesteps"][: len(samples)] = timesteps_S[list(samples)]
        others["present"] = torch.arange(slots) < len(samples)
        return batches.begin(samples, slots, others)

    return ThreadedEvalSource(shard, batches.threads, begin, batches.close)


def _open(root: Path, found: Manifest, split: str, own: FluxConfig, layout: Layout, most_open: int) -> ArrayBatches:
    shapes, count = EncodingSizes.of(own.facts).shapes, found.counts[f"{split}_samples"]
    arrays = open_index(root, found, SPLITS[split], count, shapes, REMEDY, integers=split == "eval")
    pin_memory = layout.device.type == "cuda"
    return ArrayBatches(arrays, own.reader.threads, own.reader.prefetch, pin_memory, most_open, _VERIFY)
