"""SSD300's data: batches from prepared pictures with boxes (see :mod:`benchmarks.ssd300.prepare`).

Both kinds of batches have ``image`` (B, C, H, W), normalised, in channels_last memory, with zeros in the channels
after the third. A training batch also has ``boxes`` (B, M, 4) fp32, corners x1, y1, x2, y2 as fractions of the
picture, ``label`` (B, M) int64, classes from 1, and ``count`` (B,) int64, the number of boxes; unused slots are 0. An
evaluation batch has ``picture`` (B,) int64, ids with -1 for padding, and ``size`` (B, 2) fp32, height and width before
resizing, px.
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
    """Open the evaluation data under ``root`` for this rank, after ``run_start``. Raises like :func:`open_train`.

    Args:
        batch: samples of an evaluation batch on this rank.
    """
    found = read_manifest(root, settings)
    shard = EvalShard(found.counts["eval_samples"], batch, layout.size("dp"), layout.index("dp"))
    pictures = AnnotatedPictures(root, "val", found)
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.ssd300 import dali_reader

        return dali_reader.eval_source(pictures, settings, shard, layout.device)
    from benchmarks.ssd300 import torchvision_reader

    return torchvision_reader.eval_source(pictures, settings, shard, layout.device.type == "cuda")


def ground_truth(root: Path) -> Annotations:
    """Return the boxes of the evaluation set under ``root``; raises :class:`DataError` like :func:`open_train`."""
    return read_annotations(root, "val", manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS))


def category_ids(root: Path, settings: DataSettings) -> list[int]:
    """Return the class ids in the data under ``root``, in the order of the classes; raises like :func:`open_train`."""
    found: list[int] = read_annotations(root, "val", read_manifest(root, settings)).class_id.tolist()
    return found


def warm_up(settings: DataSettings, layout: Layout, batch: int) -> None:
    """Load and warm up the reader's libraries before ``run_start``, without reading data.

    ``batch`` is the micro-batch size of training.
    """
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.ssd300 import dali_reader

        dali_reader.warm_up(settings, layout.device, batch * settings.reader.input_batch_multiplier)


def read_manifest(root: Path, settings: DataSettings) -> Manifest:
    """Return the manifest of ``root`` after checking it against ``settings``.

    Raises:
        DataError: the manifest is missing, malformed, of another format, or has another number of classes.
    """
    found = manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS)
    if found.counts["classes"] != settings.facts.classes:
        raise DataError(
            f"{root} holds {found.counts['classes']} classes where the model has {settings.facts.classes}: "
            "it is another data set"
        )
    return found
