"""ResNet-50's data: batches of pictures from prepared RecordIO (see :mod:`benchmarks.resnet.prepare`).

A batch has ``image`` (N, C, H, W), normalised, in channels_last memory, with zeros in the channels after the third,
and ``label`` (N,) int64, where -1 marks padding in evaluation.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.resnet.data_settings import DataSettings
from benchmarks.resnet.prepare import FORMAT, PREPARE_COMMAND
from common.data import manifest
from common.data.batches import DataSource, EvalSource
from common.data.dali import choose_reader
from common.data.manifest import Manifest
from common.data.order import EpochStream, EvalShard
from common.distributed.layout import Layout
from common.errors import DataError
from common.formats.recordio import RecordReader


def open_train(
    root: Path, settings: DataSettings, layout: Layout, micro_batch: int, accumulation: int = 1
) -> DataSource:
    """Open the training data under ``root`` for this rank. Call it after ``run_start``.

    Args:
        layout: gives the replica (axis dp), the device and the seed.
        micro_batch: pictures per micro-batch of a replica.
        accumulation: micro-batches per step of a replica.

    Raises:
        DataError: manifest or files are missing, damaged, or do not fit the settings.
        ConfigError: the reader does not support the settings.
    """
    found = read_manifest(root, settings)
    stream = EpochStream(
        found.counts["train_samples"], micro_batch, accumulation, layout.size("dp"), layout.index("dp"), layout.seed
    )
    counts = (found.counts["eval_samples"], found.stand_in)
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.resnet import dali_reader

        return dali_reader.train_source(root / "train.rec", settings, stream, *counts, layout.device)
    from benchmarks.resnet import torchvision_reader

    reader = _open_records(root / "train.rec", stream.train_samples)
    return torchvision_reader.train_source(reader, settings, stream, *counts, pin_memory=layout.device.type == "cuda")


def open_eval(root: Path, settings: DataSettings, layout: Layout, batch: int) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank, after ``run_start``. Raises like :func:`open_train`.

    Args:
        batch: samples of an evaluation batch on this rank.
    """
    found = read_manifest(root, settings)
    shard = EvalShard(found.counts["eval_samples"], batch, layout.size("dp"), layout.index("dp"))
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.resnet import dali_reader

        return dali_reader.eval_source(root / "val.rec", settings, shard, layout.device)
    from benchmarks.resnet import torchvision_reader

    reader = _open_records(root / "val.rec", shard.eval_samples)
    return torchvision_reader.eval_source(reader, settings, shard, pin_memory=layout.device.type == "cuda")


def warm_up(settings: DataSettings, layout: Layout, batch: int) -> None:
    """Load and warm up the reader's libraries before ``run_start``, without reading data.

    ``batch`` is the micro-batch size of training.
    """
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.resnet import dali_reader

        dali_reader.warm_up(settings, layout.device, batch * settings.reader.input_batch_multiplier)


def read_manifest(root: Path, settings: DataSettings) -> Manifest:
    """Return the manifest of ``root`` after checking it against ``settings``.

    Raises:
        DataError: the manifest is missing, malformed, of another format, or has more classes than the settings.
    """
    found = manifest.read(root, FORMAT, PREPARE_COMMAND, ("train_samples", "eval_samples", "classes"))
    if found.counts["classes"] > settings.facts.classes:
        raise DataError(
            f"{root} holds {found.counts['classes']} classes where the model has {settings.facts.classes}: "
            "it is another data set"
        )
    return found


def _open_records(rec: Path, expected: int) -> RecordReader:
    reader = RecordReader(rec)
    if len(reader) != expected:
        reader.close()
        raise DataError(
            f"{rec} has {len(reader)} records where {manifest.NAME} says {expected}; run '{PREPARE_COMMAND}'"
        )
    return reader
