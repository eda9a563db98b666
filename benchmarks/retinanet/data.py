"""RetinaNet's data: batches from prepared pictures and boxes (see :mod:`benchmarks.retinanet.prepared`).

Both kinds of batches have ``image`` (B, 3, S, S), normalised, in channels_last memory. A training batch also has
``boxes`` (B, M, 4) fp32, corners in px of the resized picture, ``label`` (B, M) int64, and ``count`` (B,) int64, the
number of boxes per picture; unused slots are 0. An evaluation batch has ``picture`` (B,) int64, ids, and ``size`` (B,
2) fp32, height and width before resizing; padding has id -1 and size 0.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.retinanet.data_settings import DataSettings
from benchmarks.retinanet.prepared import LABELS, Prepared, Split, open_prepared
from common.data.batches import DataSource, EvalSource
from common.data.dali import choose_reader
from common.data.order import EpochStream, EvalShard
from common.detection.annotations import Annotations
from common.detection.picture_boxes import PictureBoxes
from common.distributed.layout import Layout
from common.errors import DataError


def open_train(
    root: Path, settings: DataSettings, layout: Layout, micro_batch: int, accumulation: int = 1
) -> DataSource:
    """Open the training data under ``root`` for this rank. Call it after ``run_start``.

    Args:
        root: prepared data, or a folder of the reference's script.
        layout: gives the replica (axis dp), the device and the seed.
        micro_batch: pictures per micro-batch of a replica.
        accumulation: micro-batches per step of a replica.

    Raises:
        DataError: files are missing, damaged, or do not fit the settings; a picture has more than ``max_boxes`` boxes.
        ConfigError: the reader does not support the settings.
    """
    prepared = open_prepared(root)
    split = _open_split(prepared, "train", settings)
    boxes = PictureBoxes.of(split.annotations)
    boxes.require_room(settings.reader.max_boxes, split.names, "raise reader.max_boxes")
    stream = EpochStream(len(split), micro_batch, accumulation, layout.size("dp"), layout.index("dp"), layout.seed)
    counts = (prepared.samples("eval"), prepared.stand_in)
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.retinanet import dali_reader

        return dali_reader.train_source(split, boxes, settings, stream, *counts, layout.device)
    from benchmarks.retinanet import torchvision_reader

    pin_memory = layout.device.type == "cuda"
    return torchvision_reader.train_source(split, boxes, settings, stream, *counts, pin_memory=pin_memory)


def open_eval(root: Path, settings: DataSettings, layout: Layout, batch: int) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank, after ``run_start``. Raises like :func:`open_train`.

    Args:
        batch: samples of an evaluation batch on this rank.
    """
    split = _open_split(open_prepared(root), "eval", settings)
    shard = EvalShard(len(split), batch, layout.size("dp"), layout.index("dp"))
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.retinanet import dali_reader

        return dali_reader.eval_source(split, settings, shard, layout.device)
    from benchmarks.retinanet import torchvision_reader

    return torchvision_reader.eval_source(split, settings, shard, pin_memory=layout.device.type == "cuda")


def ground_truth(root: Path) -> Annotations:
    """Return the boxes with which detections are compared in evaluation. Call it after ``run_start``.

    Raises:
        DataError: files are missing or damaged.
    """
    return open_prepared(root).split("eval").annotations


def warm_up(settings: DataSettings, layout: Layout, batch: int) -> None:
    """Load and warm up the reader's libraries before ``run_start``, without reading data.

    ``batch`` is the micro-batch size of training.
    """
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.retinanet import dali_reader

        dali_reader.warm_up(settings, layout.device, batch * settings.reader.input_batch_multiplier)


def _open_split(prepared: Prepared, name: str, settings: DataSettings) -> Split:
    split = prepared.split(name)
    classes = len(split.annotations.class_id)
    if classes > settings.facts.classes:
        raise DataError(
            f"{prepared.root} holds {classes} classes where the model has {settings.facts.classes}: it is another data "
            "set"
        )
    if not len(split):
        raise DataError(f"{split.folder.parent / LABELS} has no pictures")
    return split
