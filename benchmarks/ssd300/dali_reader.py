"""DALI reader: threads read the records in the suite's order; DALI decodes, crops, resizes and changes colours.

The host draws all augmentations, with the random numbers of the other reader, because it also crops and mirrors the
boxes. DALI changes brightness, contrast, saturation and hue in its own order, and contrast around middle grey, as in
NVIDIA's submissions.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from nvidia import dali
from PIL import Image
from torch import Tensor

from benchmarks.ssd300.annotated import AnnotatedPictures
from benchmarks.ssd300.augment import Augmentation, draw
from benchmarks.ssd300.data_settings import DataSettings
from common.data.dali import PipelineEvalSource, decoder_arguments, new_pipeline
from common.data.dali_feed import FedRunner, FedTrainSource, Feed, Inputs, begin_feed
from common.data.order import EpochStream, EvalShard, sample_generator
from common.data.threads import SampleThreads
from common.detection.picture_boxes import empty_boxes, evaluation_columns, put_boxes

fn: Any = dali.fn  # DALI's type stubs are incomplete
types: Any = dali.types

# Sizes of DALI's initial allocations, which avoid allocations during training. COCO's sides are at most 640 px.
DECODER_SIDE = 640  # px, buffer of the hardware decoder
PADDING_BYTES = 16 << 20  # device and pinned buffers of nvJPEG

UNCHANGED = (0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0)
"""DALI's inputs for a picture without augmentation.

They are left, top, width and height of the crop as fractions, mirror flag, factors of brightness, contrast and
saturation, and hue shift in degrees.
"""


def train_source(
    pictures: AnnotatedPictures,
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
    multiplier, pinned = settings.reader.input_batch_multiplier, device.type == "cuda"
    threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)

    def begin(number: int) -> Feed:
        samples = [sample for part in range(multiplier) for sample in stream.samples_of(number + part)]
        tensors = empty_boxes(len(samples), settings.reader.max_boxes, pinned)
        numbers_BF = np.empty((len(samples), len(UNCHANGED)), np.float32)

        def put(slot: int) -> None:
            epoch, place = samples[slot]
            boxes_M4, label_M = pictures.boxes(place)
            random = sample_generator(stream.seed, epoch, place)
            plan = draw(boxes_M4, settings.facts, settings.crop_attempts, random)
            put_boxes(tensors, slot, plan.boxes.astype(np.float32), label_M[plan.crop.kept])
            numbers_BF[slot] = numbers_of(plan, *pictures.size(place))

        names = [pictures.describe(place) for _, place in samples]
        return begin_feed(threads, names, lambda slot: pictures.whole_jpeg(samples[slot][1]), numbers_BF, tensors, put)

    batch = stream.micro_batch * multiplier
    runner = _runner(pictures, batch, settings, device, threads, begin, multiplier, training=True)
    return FedTrainSource(runner, stream, multiplier, eval_samples, stand_in, _channels_first)


def eval_source(
    pictures: AnnotatedPictures, settings: DataSettings, shard: EvalShard, device: torch.device
) -> PipelineEvalSource:
    """Return the evaluation batches of one replica; padding has id -1. Raises like :func:`train_source`.

    Args:
        shard: samples and batch size of this replica.
        device: device that decodes the pictures and receives the batches.
    """
    threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)

    def begin(number: int) -> Feed:
        real = list(shard.samples(number % shard.batches))
        tensors = evaluation_columns(pictures.annotations, real, shard.batch, device.type == "cuda")
        places = real + [real[-1] if real else 0] * (shard.batch - len(real))
        numbers_BF = np.tile(np.array(UNCHANGED, np.float32), (shard.batch, 1))
        names = [pictures.describe(place) for place in places]
        return begin_feed(threads, names, lambda slot: pictures.whole_jpeg(places[slot]), numbers_BF, tensors)

    runner = _runner(pictures, shard.batch, settings, device, threads, begin, 1, training=False)
    return PipelineEvalSource(runner, shard, lambda tensors, valid: _channels_first(tensors))


def numbers_of(plan: Augmentation, width: int, height: int) -> Sequence[float]:
    """Return DALI's inputs for a picture of ``width`` x ``height`` px, in the order of :data:`UNCHANGED`."""
    left, top, right, bottom = plan.crop.pixels(width, height)
    # These are fractions for whole pixels, so that DALI's rounding gives the same crop as the other reader.
    crop = (left / width, top / height, (right - left) / width, (bottom - top) / height)
    factors = (plan.amount("brightness"), plan.amount("contrast"), plan.amount("saturation"))
    return (*crop, float(plan.flip), *factors, 360 * plan.amount("hue"))


def _runner(
    pictures: AnnotatedPictures,
    batch: int,
    settings: DataSettings,
    device: torch.device,
    threads: SampleThreads,
    begin: Callable[[int], Feed],
    step: int,
    training: bool,
) -> FedRunner:
    def build(source: Callable[[], Inputs]) -> Any:
        return picture_pipeline(source, batch, settings, device, training)

    # DALI asks for all its prefetched runs at once. The same number of files is read while it processes them.
    prefetch = settings.reader.prefetch
    return FedRunner(
        build, begin, step, threads, prefetch, ("image",), (settings.dtype,), pictures.path, pictures.close
    )


def picture_pipeline(
    source: Callable[[], Inputs], batch: int, settings: DataSettings, device: torch.device, training: bool
) -> Any:
    """Build the pipeline: decode, crop, resize, change colours, mirror, normalise. Outputs pictures (N, S, S, C).

    Without ``training``, pictures are only resized and normalised, and the augmentation inputs are ignored.
    """
    reader, size = settings.reader, settings.facts.image_size
    pipeline = new_pipeline(batch, device, 0, reader.threads, reader.prefetch)
    with pipeline:
        if training:
            jpeg, numbers = fn.external_source(
                source=source, num_outputs=2, dtype=[types.UINT8, types.FLOAT], ndim=[1, 1]
            )
        else:
            jpeg = fn.external_source(source=lambda: source()[0], dtype=types.UINT8, ndim=1)
        load = settings.reader.hw_decoder_load
        decoder = decoder_arguments(device, load, DECODER_SIDE, DECODER_SIDE, PADDING_BYTES)
        picture = fn.decoders.image(jpeg, **decoder)
        mirrored: Any = 0
        if training:
            picture = fn.slice(
                picture, numbers[0:2], numbers[2:4], axis_names="WH", normalized_anchor=True, normalized_shape=True
            )
            mirrored = fn.cast(numbers[4], dtype=types.INT32)
        # Bilinear with an antialiasing (triangular) filter, as in Pillow
        picture = fn.resize(picture, size=[size, size], interp_type=types.INTERP_LINEAR, antialias=True)
        if training:
            picture = fn.color_twist(
                picture, brightness=numbers[5], contrast=numbers[6], saturation=numbers[7], hue=numbers[8]
            )
        normalised = fn.crop_mirror_normalize(
            picture,
            dtype=types.FLOAT16 if settings.dtype == torch.float16 else types.FLOAT,
            output_layout="HWC",
            crop=[size, size],
            mean=list(settings.facts.mean),
            std=list(settings.facts.std),
            mirror=mirrored,
            pad_output=True,
        )
        pipeline.set_outputs(normalised)
    pipeline.build()
    return pipeline


def warm_up(settings: DataSettings, device: torch.device, batch: int) -> None:
    """Run every operator once on a synthetic picture to load libraries, memory pools and kernels.

    Reads no file, so that it may run before ``run_start``.
    """
    buffer = io.BytesIO()
    Image.new("RGB", (640, 480), (120, 60, 30)).save(buffer, "JPEG")
    numbers_BF = np.tile(np.array(UNCHANGED, np.float32), (batch, 1))
    inputs = ([np.frombuffer(buffer.getvalue(), np.uint8)] * batch, numbers_BF)
    picture_pipeline(lambda: inputs, batch, settings, device, training=True).run()


def _channels_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"image": tensors["image"].permute(0, 3, 1, 2)}
