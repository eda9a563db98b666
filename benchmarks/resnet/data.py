"""ResNet-50's data: prepared RecordIO (see :mod:`benchmarks.resnet.prepare`) to batches of pictures.

A batch has ``image`` (N, C, H, W) in channels_last memory, normalised, its channels beyond the third exactly zero, and
``label`` (N,) int64; -1 marks padding in evaluation. ``python -m benchmarks.resnet.data --measure`` times a reader.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.resnet.config import Facts, ReaderConfig
from benchmarks.resnet.data_settings import DataSettings
from benchmarks.resnet.prepare import FORMAT, PREPARE_COMMAND
from benchmarks.resnet.recordio import RecordReader
from common import config
from common.data import dali, manifest
from common.data.manifest import Manifest
from common.data.order import EpochStream, EvalShard
from common.data.source import Block, DataSource, HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError
from common.mlperf.fixed import benchmark_settings


class EvalSource(Protocol):
    """Evaluation data of one replica: iterate once per evaluation.

    Every replica yields ``len(source)`` batches of the same shape; all real samples together, the labels that are not
    -1, are the evaluation set, each once.
    """

    eval_samples: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[HostBatch]: ...

    def close(self) -> None:
        """Stop threads and close files."""
        ...


def open_train(
    root: Path, settings: DataSettings, layout: Layout, micro_batch: int, accumulation: int = 1
) -> DataSource:
    """Open the training data under ``root`` for this rank; after ``run_start``.

    Args:
        root: prepared data.
        settings: reader and transforms.
        layout: the replica (axis dp), the device and the seed.
        micro_batch: pictures of a micro-batch of one replica.
        accumulation: micro-batches per step of a replica.

    Raises:
        DataError: manifest or files are missing, damaged, or do not fit the settings.
        ConfigError: the reader cannot serve the settings.
    """
    found = read_manifest(root, settings)
    stream = EpochStream(
        found.counts["train_samples"], micro_batch, accumulation, layout.size("dp"), layout.index("dp"), layout.seed
    )
    counts = (found.counts["eval_samples"], found.stand_in)
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.resnet.dali_reader import DaliTrainSource

        return DaliTrainSource(root / "train.rec", settings, stream, *counts, layout.device)
    from benchmarks.resnet.torchvision_reader import TorchvisionTrainSource

    reader = _open_records(root / "train.rec", stream.train_samples)
    return TorchvisionTrainSource(reader, settings, stream, *counts, pin_memory=layout.device.type == "cuda")


def open_eval(root: Path, settings: DataSettings, layout: Layout, batch: int) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank; after ``run_start``. Raises as :func:`open_train`."""
    found = read_manifest(root, settings)
    shard = EvalShard(found.counts["eval_samples"], batch, layout.size("dp"), layout.index("dp"))
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.resnet.dali_reader import DaliEvalSource

        return DaliEvalSource(root / "val.rec", settings, shard, layout.device)
    from benchmarks.resnet.torchvision_reader import TorchvisionEvalSource

    reader = _open_records(root / "val.rec", shard.eval_samples)
    return TorchvisionEvalSource(reader, settings, shard, pin_memory=layout.device.type == "cuda")


def warm_up(settings: DataSettings, layout: Layout, batch: int) -> None:
    """Load and warm the reader's libraries without touching data; before ``run_start``. ``batch`` as in training."""
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.resnet import dali_reader

        dali_reader.warm_up(settings, layout.device, batch * settings.reader.input_batch_multiplier)


def read_manifest(root: Path, settings: DataSettings) -> Manifest:
    """The manifest of ``root``, checked against ``settings``.

    Raises:
        DataError: it is missing, garbled, of another format, or has more classes than the settings.
    """
    found = manifest.read(root, FORMAT, PREPARE_COMMAND)
    for count in ("train_samples", "eval_samples", "classes"):
        if found.counts.get(count, 0) < 1:
            raise DataError(f"{root / manifest.NAME} has no {count}; run '{PREPARE_COMMAND}'")
    if found.counts["classes"] > settings.facts.classes:
        raise DataError(
            f"{root} holds {found.counts['classes']} classes where the model has {settings.facts.classes}: "
            "it is another data set"
        )
    return found


def choose_reader(requested: str) -> str:
    """``dali`` or ``torchvision``; ``auto`` is DALI where it is installed.

    Raises:
        ConfigError: DALI is asked for and cannot be imported.
    """
    if requested == "torchvision":
        return "torchvision"
    reason = dali.unavailable()
    if requested == "auto":
        return "dali" if reason is None else "torchvision"
    if reason is not None:
        raise ConfigError(
            f"reader.reader=dali: {reason}; install the extra dali-cu13 (or dali-cu12), or reader.reader=torchvision"
        )
    return "dali"


def _open_records(rec: Path, expected: int) -> RecordReader:
    reader = RecordReader(rec)
    if len(reader) != expected:
        reader.close()
        raise DataError(
            f"{rec} has {len(reader)} records where {manifest.NAME} says {expected}; run '{PREPARE_COMMAND}'"
        )
    return reader


def measure(root: Path, settings: DataSettings, device: torch.device, batch: int, seconds: float) -> float:
    """Training pictures per second of the reader alone, over whole batches for ``seconds`` after a warm-up.

    With a cache the warm-up is one epoch, so that what counts is the filled cache.
    """
    source = open_train(root, settings, Layout(device=device), batch)
    warm_up = -(-source.train_samples // batch) if settings.reader.cache_mb else 3 * settings.reader.prefetch
    block = Block(0, 1, 10_000, 0, 10_000 * source.train_samples)
    pictures, started = 0, 0.0
    try:
        for host_batch in source.batches(block):
            if host_batch.position < warm_up:
                continue
            if device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if not started:
                started = now
                continue
            pictures += batch
            if now - started >= seconds:
                return pictures / (now - started)
    finally:
        source.close()
    raise AssertionError("the block ended")


def main() -> None:
    """Time the readers: ``python -m benchmarks.resnet.data --measure --data-dir DATA``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resnet.data", description=measure.__doc__)
    parser.add_argument("--measure", action="store_true", required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--reader", choices=("auto", "dali", "torchvision"), default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=400)
    parser.add_argument("--multiplier", type=int, default=1, help="input batch multiplier (DALI)")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--prefetch", type=int, default=3)
    parser.add_argument("--cache-mb", type=int, default=12_288, help="of the second measurement (DALI on a GPU)")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--hw-decoder-load", type=float, default=0.99)
    parser.add_argument("--pinned-pool-mb", type=int, default=0, help="pinned memory taken at once (DALI on a GPU)")
    parser.add_argument("--seconds", type=float, default=15)
    args = parser.parse_args()
    facts = config.build(Facts, benchmark_settings("resnet")["facts"], "benchmark.facts")
    facts = replace(facts, image_size=args.image_size, eval_resize=args.image_size * 8 // 7)
    uncached = ReaderConfig(
        reader=args.reader,
        threads=args.threads,
        prefetch=args.prefetch,
        hw_decoder_load=args.hw_decoder_load,
        cache_mb=0,
        eval_cache_mb=0,
        input_batch_multiplier=args.multiplier,
        dont_use_mmap=False,
        pinned_pool_mb=args.pinned_pool_mb,
        eval_batch=args.batch,
    )
    settings = DataSettings(facts, uncached, channels=4, dtype=torch.float16)
    device = torch.device(args.device)
    reader = choose_reader(settings.reader.reader)
    caches = (0, args.cache_mb) if reader == "dali" and device.type == "cuda" else (0,)
    for cache_mb in caches:
        cached = replace(settings, reader=replace(uncached, cache_mb=cache_mb))
        rate = measure(args.data_dir, cached, device, args.batch, args.seconds)
        print(
            f"{reader} on {device}, batch {args.batch} x {args.multiplier}, {args.threads} threads, "
            f"cache {cache_mb} MB: {rate:.0f} images/s"
        )


if __name__ == "__main__":
    main()
