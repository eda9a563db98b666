"""SSD300's data: prepared pictures with boxes (see :mod:`benchmarks.ssd300.prepare`) to batches.

A training batch has ``image`` (B, C, H, W) in channels_last memory, normalised, its channels beyond the third exactly
zero; ``boxes`` (B, M, 4) fp32, corners x1, y1, x2, y2 as shares of the picture; ``label`` (B, M) int64, classes from 1;
and ``count`` (B,) int64, how many of the M are boxes; the others are 0. An evaluation batch has ``image``, ``picture``
(B,) int64, the ids of the pictures, -1 for padding, and ``size`` (B, 2) fp32, their height and width before they were
resized, px.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.ssd300.annotated import FORMAT, PREPARE_COMMAND, AnnotatedPictures, read_annotations
from benchmarks.ssd300.data_settings import DataSettings
from common.data import manifest
from common.data.batches import DataSource, EvalSource
from common.data.dali import choose_reader
from common.data.manifest import Manifest
from common.data.order import EpochStream, EvalShard
from common.detection.annotations import Annotations
from common.distributed.layout import Layout
from common.errors import DataError

COUNTS = ("train_samples", "eval_samples", "classes", "train_boxes", "val_boxes")


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
    pictures = AnnotatedPictures(root, "train", found)
    try:
        pictures.require_room(settings.reader.max_boxes)
    except DataError:
        pictures.close()
        raise
    counts = (found.counts["eval_samples"], found.stand_in)
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.ssd300 import dali_reader

        return dali_reader.train_source(pictures, settings, stream, *counts, layout.device)
    from benchmarks.ssd300 import torchvision_reader

    return torchvision_reader.train_source(pictures, settings, stream, *counts, layout.device.type == "cuda")


def open_eval(root: Path, settings: DataSettings, layout: Layout, batch: int) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank; after ``run_start``. Raises as :func:`open_train`."""
    found = read_manifest(root, settings)
    shard = EvalShard(found.counts["eval_samples"], batch, layout.size("dp"), layout.index("dp"))
    pictures = AnnotatedPictures(root, "val", found)
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.ssd300 import dali_reader

        return dali_reader.eval_source(pictures, settings, shard, layout.device)
    from benchmarks.ssd300 import torchvision_reader

    return torchvision_reader.eval_source(pictures, settings, shard, layout.device.type == "cuda")


def ground_truth(root: Path) -> Annotations:
    """The boxes of the evaluation set under ``root``; raises :class:`DataError` as :func:`open_train`."""
    return read_annotations(root, "val", manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS))


def category_ids(root: Path, settings: DataSettings) -> list[int]:
    """What the data under ``root`` call the classes, in their order; raises as :func:`open_train`."""
    found: list[int] = read_annotations(root, "val", read_manifest(root, settings)).class_id.tolist()
    return found


def warm_up(settings: DataSettings, layout: Layout, batch: int) -> None:
    """Load and warm the reader's libraries without touching data; before ``run_start``. ``batch`` as in training."""
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.ssd300 import dali_reader

        dali_reader.warm_up(settings, layout.device, batch * settings.reader.input_batch_multiplier)


def read_manifest(root: Path, settings: DataSettings) -> Manifest:
    """The manifest of ``root``, checked against ``settings``.

    Raises:
        DataError: it is missing, garbled, of another format, or has other classes than the settings.
    """
    found = manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS)
    if found.counts["classes"] != settings.facts.classes:
        raise DataError(
            f"{root} holds {found.counts['classes']} classes where the model has {settings.facts.classes}: "
            "it is another data set"
        )
    return found
