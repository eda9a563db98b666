"""DALI reader: threads read the records in the suite's order, and DALI only decodes them.

The columns of a batch come from the same code as in the other reader.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia import dali
from PIL import Image
from torch import Tensor

from benchmarks.maskrcnn.data_settings import DataSettings
from benchmarks.maskrcnn.host_batches import TrainingColumns, evaluation_columns, slots_of
from benchmarks.maskrcnn.pictures import resized_sizes
from benchmarks.maskrcnn.prepared import TrainingPictures
from common.data.dali import PipelineEvalSource, decoder_arguments, new_pipeline
from common.data.dali_feed import FedRunner, FedTrainSource, Feed, Inputs, begin_feed
from common.data.grouped_order import GroupedShard, GroupedStream
from common.data.threads import SampleThreads
from common.detection.coco_pictures import CocoPictures

fn: Any = dali.fn  # DALI's type stubs are incomplete
types: Any = dali.types

PADDING_BYTES = 16 << 20
"""Size of nvJPEG's device and pinned buffers, which are allocated before training."""


def train_source(
    training: TrainingPictures,
    settings: DataSettings,
    stream: GroupedStream,
    eval_samples: int,
    stand_in: bool,
    device: torch.device,
) -> FedTrainSource:
    """Return the training batches of one replica.

    Args:
        stream: order of the samples of this replica.
        eval_samples: size of the evaluation set.
        stand_in: whether the data are synthetic.
        device: device that decodes the pictures and receives the batches.

    Raises:
        DataError: while reading: a picture is unreadable or undecodable.
    """
    multiplier, pictures = settings.reader.input_batch_multiplier, training.pictures
    columns = TrainingColumns(training.objects, settings, stream.seed, device.type == "cuda")
    threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)

    def begin(number: int) -> Feed:
        slots = [slot for part in range(multiplier) for slot in slots_of(stream, number + part)]
        tensors = columns.empty(len(slots))
        return begin_feed(
            threads,
            [pictures.describe(slot.place) for slot in slots],
            lambda slot: pictures.whole_jpeg(slots[slot].place),
            np.zeros(len(slots), np.int32),
            tensors,
            lambda slot: columns.put(tensors, slot, slots[slot]),
        )

    batch = stream.micro_batch * multiplier
    runner = _runner(batch, settings, device, threads, begin, multiplier, pictures.path, pictures.close)
    return FedTrainSource(runner, stream, multiplier, eval_samples, stand_in, _with_one_seed)


def eval_source(
    pictures: CocoPictures, settings: DataSettings, shard: GroupedShard, device: torch.device
) -> PipelineEvalSource:
    """Return the evaluation batches of one replica; padding has id -1. Raises like :func:`train_source`.

    Args:
        shard: samples and batch size of this replica.
        device: device that decodes the pictures and receives the batches.
    """
    threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)
    facts, annotations = settings.facts, pictures.annotations
    size_P2 = np.stack([annotations.picture_height, annotations.picture_width], 1)
    resized_P2 = resized_sizes(size_P2, facts.min_size, facts.max_size)

    def begin(number: int) -> Feed:
        real = list(shard.samples(number % shard.batches))
        places = real + [real[-1] if real else 0] * (shard.batch - len(real))
        return begin_feed(
            threads,
            [pictures.describe(place) for place in places],
            lambda slot: pictures.whole_jpeg(places[slot]),
            np.zeros(len(places), np.int32),
            evaluation_columns(annotations, resized_P2, real, shard.batch, device.type == "cuda"),
        )

    runner = _runner(shard.batch, settings, device, threads, begin, 1, pictures.path, pictures.close)
    return PipelineEvalSource(runner, shard, lambda tensors, valid: tensors)


def _runner(
    batch: int,
    settings: DataSettings,
    device: torch.device,
    threads: SampleThreads,
    begin: Callable[[int], Feed],
    step: int,
    path: Path,
    close_data: Callable[[], None],
) -> FedRunner:
    def build(source: Callable[[], Inputs]) -> Any:
        return picture_pipeline(source, batch, settings, device)

    # DALI asks for all its prefetched runs at once. The same number of files is read while it processes them.
    prefetch = settings.reader.prefetch
    return FedRunner(build, begin, step, threads, prefetch, ("pixels",), (torch.uint8,), path, close_data)


def picture_pipeline(source: Callable[[], Inputs], batch: int, settings: DataSettings, device: torch.device) -> Any:
    """Build the pipeline: decode to the top left of slots. Outputs (N, S, S, 3) uint8, zero outside the pictures."""
    reader, side = settings.reader, settings.facts.longest_side
    pipeline = new_pipeline(batch, device, 0, reader.threads, reader.prefetch)
    with pipeline:
        jpeg = fn.external_source(source=lambda: source()[0], dtype=types.UINT8, ndim=1)
        decoder = decoder_arguments(device, reader.hw_decoder_load, side, side, PADDING_BYTES)
        picture = fn.decoders.image(jpeg, **decoder)
        pipeline.set_outputs(fn.pad(picture, axes=[0, 1], shape=[side, side], fill_value=0))
    pipeline.build()
    return pipeline


def warm_up(settings: DataSettings, device: torch.device, batch: int) -> None:
    """Run every operator once on a synthetic picture to load libraries, memory pools and kernels.

    Reads no file, so that it may run before ``run_start``.
    """
    side = settings.facts.longest_side
    buffer = io.BytesIO()
    Image.new("RGB", (side, max(1, side * 3 // 4)), (120, 60, 30)).save(buffer, "JPEG")
    inputs = ([np.frombuffer(buffer.getvalue(), np.uint8)] * batch, np.zeros(batch, np.int32))
    picture_pipeline(lambda: inputs, batch, settings, device).run()


def _with_one_seed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep one seed, because all pictures of a micro-batch have the same."""
    return tensors | {"seed": tensors["seed"][:1]}
