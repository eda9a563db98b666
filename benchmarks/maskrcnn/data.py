"""Mask R-CNN's data: batches from prepared pictures with masks (see :mod:`benchmarks.maskrcnn.prepared`).

A training batch of a reader has the padded height and width as key. It has ``pixels`` (B, S, S, 3) uint8, decoded
pictures at the top left of slots of ``facts.longest_side`` px, red first, one ``seed`` (1,), and the other columns of
:meth:`benchmarks.maskrcnn.host_batches.TrainingColumns.empty`. An evaluation batch has ``pixels`` and the columns of
:func:`benchmarks.maskrcnn.host_batches.evaluation_columns`. :class:`benchmarks.maskrcnn.preparer.Preparer` computes
the network's input from them on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.maskrcnn.data_settings import DataSettings
from benchmarks.maskrcnn.kept_pictures import KeptSource
from benchmarks.maskrcnn.pictures import PaddedShapes, orientation, resized_sizes
from benchmarks.maskrcnn.prepared import Prepared, open_prepared
from common.data.batches import DataSource, EvalSource
from common.data.dali import choose_reader
from common.data.grouped_order import GroupedShard, GroupedStream
from common.data.order import MicroBatches
from common.distributed.layout import Layout
from common.errors import DataError


def open_train(
    root: Path, settings: DataSettings, layout: Layout, micro_batch: int, accumulation: int = 1
) -> DataSource:
    """Open the training data under ``root`` for this rank. Call it after ``run_start``.

    A micro-batch has either only pictures that are wider than high or only others.

    Args:
        layout: gives the replica (axis dp), the device and the seed.
        micro_batch: pictures per micro-batch of a replica.
        accumulation: micro-batches per step of a replica.

    Raises:
        DataError: manifest or files are missing, damaged, or do not fit the settings.
        ConfigError: the reader does not support the settings.
    """
    kind, prepared = choose_reader(settings.reader.reader), read_prepared(root, settings)
    mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    training = prepared.train()
    pictures, size_P2 = training.pictures, training.objects.size
    try:
        training.require_room(settings.reader.max_boxes)
        shapes, group_P = _padded_shapes(size_P2, settings, pictures.describe), orientation(size_P2)
        shapes.require_common(group_P)
    except DataError:
        pictures.close()
        raise
    stream = GroupedStream(group_P, mine, layout.seed, shapes.of)
    counts = (prepared.samples("val"), prepared.stand_in)
    if kind == "dali":
        from benchmarks.maskrcnn import dali_reader

        return dali_reader.train_source(training, settings, stream, *counts, layout.device)
    from benchmarks.maskrcnn import torchvision_reader

    return torchvision_reader.train_source(training, settings, stream, *counts, layout.device.type == "cuda")


def open_eval(root: Path, settings: DataSettings, layout: Layout, batch: int) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank. Call it after ``run_start``.

    A batch has only pictures with the same smallest padded shape. Raises like :func:`open_train`.
    """
    kind, prepared = choose_reader(settings.reader.reader), read_prepared(root, settings)
    pictures = prepared.validation()
    annotations = pictures.annotations
    size_P2 = np.stack([annotations.picture_height, annotations.picture_width], 1)
    try:
        shapes = _padded_shapes(size_P2, settings, pictures.describe)
    except DataError:
        pictures.close()
        raise
    keys = [shapes.of([place]) for place in range(len(pictures))]
    shard = GroupedShard(keys, batch, layout.size("dp"), layout.index("dp"))
    source: EvalSource
    if kind == "dali":
        from benchmarks.maskrcnn import dali_reader

        source = dali_reader.eval_source(pictures, settings, shard, layout.device)
    else:
        from benchmarks.maskrcnn import torchvision_reader

        source = torchvision_reader.eval_source(pictures, settings, shard, layout.device.type == "cuda")
    return KeptSource(source, layout.device)


def warm_up(settings: DataSettings, layout: Layout, batch: int) -> None:
    """Load and warm up the reader's libraries before ``run_start``, without reading data.

    ``batch`` is the micro-batch size of training.
    """
    if choose_reader(settings.reader.reader) == "dali":
        from benchmarks.maskrcnn import dali_reader

        dali_reader.warm_up(settings, layout.device, batch * settings.reader.input_batch_multiplier)


def read_prepared(root: Path, settings: DataSettings) -> Prepared:
    """Return the prepared data under ``root`` after checking them against ``settings``.

    Raises:
        DataError: the manifest is missing, malformed, of another format, or has another number of classes.
    """
    prepared = open_prepared(root)
    classes = prepared.manifest.counts["classes"]
    if classes != settings.facts.classes:
        raise DataError(
            f"{root} holds {classes} classes where the model has {settings.facts.classes}: it is another data set"
        )
    return prepared


def _padded_shapes(size_P2: NDArray[np.int64], settings: DataSettings, describe: Callable[[int], str]) -> PaddedShapes:
    """Return the padded shapes for pictures of these published sizes.

    Raises:
        DataError: a picture is larger than its slot, or fits no shape after resizing.
    """
    facts = settings.facts
    longest = int(size_P2.max(1).argmax())
    if size_P2[longest].max() > facts.longest_side:
        raise DataError(
            f"{describe(longest)} has a side of {size_P2[longest].max()} px, and a slot has room for "
            f"facts.longest_side={facts.longest_side}"
        )
    resized_P2 = resized_sizes(size_P2, facts.min_size, facts.max_size)
    return PaddedShapes(settings.reader.shapes, resized_P2, describe)
