"""DALI reader: threads read the files in the suite's order; DALI decodes, resizes and normalises on the GPU.

The host decides which pictures are mirrored, with the random numbers of the other reader, because it also mirrors
their boxes. As in the reference, resizing has no antialiasing and does not round.
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

from benchmarks.retinanet.data_settings import DataSettings
from benchmarks.retinanet.prepared import Split
from common.data.dali import PipelineEvalSource, decoder_arguments, new_pipeline
from common.data.dali_feed import FedRunner, FedTrainSource, Feed, Inputs, begin_feed
from common.data.order import EpochStream, EvalShard
from common.data.threads import SampleThreads
from common.detection.picture_boxes import PictureBoxes, empty_boxes, evaluation_columns, put_boxes
from common.errors import DataError
from common.formats.jpeg import REMEDY, jpeg_size

fn: Any = dali.fn  # DALI's type stubs are incomplete
types: Any = dali.types

# Sizes of DALI's initial allocations, which avoid allocations during training.
DECODER_SIDE = 7360  # px, buffer of the hardware decoder, as in NVIDIA's submissions
PADDING_BYTES = 64 << 20  # device and pinned buffers of nvJPEG


def train_source(
    split: Split,
    boxes: PictureBoxes,
    settings: DataSettings,
    stream: EpochStream,
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
    multiplier = settings.reader.input_batch_multiplier
    size, room, pinned = settings.facts.image_size, settings.reader.max_boxes, device.type == "cuda"
    threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)

    def begin(number: int) -> Feed:
        samples = [sample for part in range(multiplier) for sample in stream.samples_of(number + part)]
        mirrored = [settings.mirrors(stream.seed, epoch, place) for epoch, place in samples]
        tensors = empty_boxes(len(samples), room, pinned)

        def put(slot: int) -> None:
            put_boxes(tensors, slot, *boxes.resized(samples[slot][1], size, size, mirrored[slot]))

        flags = np.array(mirrored, np.int32)
        paths = [split.path(place) for _, place in samples]
        return begin_feed(threads, paths, lambda slot: _whole(split, samples[slot][1]), flags, tensors, put)

    batch = stream.micro_batch * multiplier
    runner = _runner(batch, settings, device, threads, begin, multiplier, split.folder)
    return FedTrainSource(runner, stream, multiplier, eval_samples, stand_in, _channels_first)


def eval_source(split: Split, settings: DataSettings, shard: EvalShard, device: torch.device) -> PipelineEvalSource:
    """Return the evaluation batches of one replica; padding has id -1. Raises like :func:`train_source`.

    Args:
        shard: samples and batch size of this replica.
        device: device that decodes the pictures and receives the batches.
    """
    threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)

    def begin(number: int) -> Feed:
        real = list(shard.samples(number % shard.batches))
        tensors = evaluation_columns(split.annotations, real, shard.batch, device.type == "cuda")
        places = real + [real[-1] if real else 0] * (shard.batch - len(real))
        paths, flags = [split.path(place) for place in places], np.zeros(shard.batch, np.int32)
        return begin_feed(threads, paths, lambda slot: _whole(split, places[slot]), flags, tensors)

    runner = _runner(shard.batch, settings, device, threads, begin, 1, split.folder)
    return PipelineEvalSource(runner, shard, lambda tensors, valid: _channels_first(tensors))


def _whole(split: Split, place: int) -> bytes:
    """Return the encoded picture ``place`` after checking that it is complete and has the expected size."""
    data = split.read(place)
    try:
        # nvJPEG would decode a truncated picture and leave the rest grey.
        width, height = jpeg_size(data)
    except ValueError as error:
        raise DataError(f"{split.path(place)}: no whole JPEG: {error}; {REMEDY}") from error
    split.check_size(place, width, height)
    return data


def _runner(
    batch: int,
    settings: DataSettings,
    device: torch.device,
    threads: SampleThreads,
    begin: Callable[[int], Feed],
    step: int,
    folder: Path,
) -> FedRunner:
    def build(source: Callable[[], Inputs]) -> Any:
        return picture_pipeline(source, batch, settings, device)

    # DALI asks for all its prefetched runs at once. The same number of files is read while it processes them.
    prefetch = settings.reader.prefetch
    return FedRunner(build, begin, step, threads, prefetch, ("image",), (settings.dtype,), folder)


def picture_pipeline(source: Callable[[], Inputs], batch: int, settings: DataSettings, device: torch.device) -> Any:
    """Build the pipeline: decode, resize, mirror flagged pictures, normalise. It outputs pictures (N, S, S, 3)."""
    reader, size = settings.reader, settings.facts.image_size
    pipeline = new_pipeline(batch, device, 0, reader.threads, reader.prefetch)
    with pipeline:
        jpeg, mirrored = fn.external_source(source=source, num_outputs=2, dtype=[types.UINT8, types.INT32], ndim=[1, 0])
        load = settings.reader.hw_decoder_load
        decoder = decoder_arguments(device, load, DECODER_SIDE, DECODER_SIDE, PADDING_BYTES)
        decoded = fn.decoders.image(jpeg, **decoder)
        resized = fn.resize(
            decoded, size=[size, size], interp_type=types.INTERP_LINEAR, antialias=False, dtype=types.FLOAT
        )
        normalised = fn.crop_mirror_normalize(
            resized,
            dtype=types.FLOAT16 if settings.dtype == torch.float16 else types.FLOAT,
            output_layout="HWC",
            crop=[size, size],
            mean=list(settings.facts.mean),
            std=list(settings.facts.std),
            mirror=mirrored,
        )
        pipeline.set_outputs(normalised)
    pipeline.build()
    return pipeline


def warm_up(settings: DataSettings, device: torch.device, batch: int) -> None:
    """Run every operator once on a synthetic picture to load libraries, memory pools and kernels.

    Reads no file, so that it may run before ``run_start``.
    """
    buffer = io.BytesIO()
    Image.new("RGB", (1024, 768), (120, 60, 30)).save(buffer, "JPEG")
    inputs = ([np.frombuffer(buffer.getvalue(), np.uint8)] * batch, np.zeros(batch, np.int32))
    picture_pipeline(lambda: inputs, batch, settings, device).run()


def _channels_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"image": tensors["image"].permute(0, 3, 1, 2)}
