"""DALI reader: decodes and augments on the GPU (JPEG engine and kernels) or on the CPU.

Without a cache, only the random crop of a picture is decoded. With a cache, the whole picture is decoded and stays on
the GPU, so that later epochs neither read nor decode it.

Each replica reads a fixed shard of the records, which preparation has shuffled, through a shuffle buffer. A record
comes once per epoch of its shard; one batch can contain the end of an epoch and the start of the next. DALI's random
state cannot be set to a position, so resuming runs all earlier batches and drops them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from nvidia import dali
from torch import Tensor

from benchmarks.resnet.config import CachedReaderConfig, Facts
from common.data.batches import Block, HostBatch
from common.data.order import EpochStream, EvalShard, sample_generator
from common.vision.dali import (
    PipelineEvalSource,
    PipelineRunner,
    SlicedBatches,
    decoder_arguments,
    new_pipeline,
    normalized,
    synthetic_jpegs,
)
from common.vision.reader import PictureData

fn: Any = dali.fn  # DALI's type stubs are incomplete
types: Any = dali.types

Data = PictureData[Facts, CachedReaderConfig]

_TRAIN, _EVAL = 0, 1

SHUFFLE_BUFFER = 10_000
"""Size of DALI's shuffle buffer in records, as in the benchmark's reference."""

# Sizes of DALI's initial allocations, which avoid allocations during training: the largest ImageNet picture, and 1.1
# times the mean bytes of each stage at 224 px (NVIDIA's MLPerf v4.0 submission).
DECODER_WIDTH, DECODER_HEIGHT = 5980, 6430  # px, buffer of the hardware decoder
DECODED_BYTES = 1_315_942  # per sample
CROPPED_BYTES = 165_581  # per sample
NORMALIZED_BYTES = 441_549  # per sample
RESIZE_BYTES = 871_491  # per sample, mean size of the temporary buffer of the resize
PADDING_BYTES = 256 << 20  # device and pinned buffers of nvJPEG


class RecordSource:
    """Training batches of one replica; a :class:`common.data.batches.DataSource` that cannot go back.

    DALI's random state advances with every batch and cannot be set to a position. Resuming therefore runs all batches
    that were consumed before and drops them.

    Args:
        runner: runner of an endless pipeline over the samples of this replica.
        stream: provides the number of micro-batches of each block.
        multiplier: micro-batches per run of the pipeline.
        synthetic: whether the data are synthetic.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        stream: EpochStream,
        multiplier: int,
        eval_samples: int,
        synthetic: bool,
    ) -> None:
        self.train_samples, self.eval_samples, self.synthetic = stream.train_samples, eval_samples, synthetic
        self.stream = stream
        self._runner = runner
        self._sliced = SlicedBatches(runner, stream.micro_batch, multiplier)

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``, and skip all micro-batches before it.

        Raises:
            DataError: DALI could not read or decode a sample.
            ValueError: the position is before the last delivered micro-batch; open the data again.
        """
        first, nominal = self.stream.first_micro_batch(block), self.stream.micro_batch * self.stream.replicas
        self._sliced.advance_to(first + start)
        for position in range(start, self.stream.micro_batches(block)):
            yield HostBatch(_channels_first(self._sliced.next()), samples=nominal, position=position)

    def close(self) -> None:
        """Release the pipeline."""
        self._runner.close()


def train_source(
    rec: Path,
    data: Data,
    stream: EpochStream,
    eval_samples: int,
    synthetic: bool,
    device: torch.device,
) -> RecordSource:
    """Return the training batches of one replica.

    Args:
        stream: order of the samples of this replica.
        synthetic: whether the data are synthetic.
        device: device that decodes the pictures and receives the batches.

    Raises:
        DataError: while reading: a picture is unreadable or undecodable.
    """
    runner = _runner(train_pipeline(rec, data, stream, device), data, rec)
    multiplier = data.reader.input_batch_multiplier
    return RecordSource(runner, stream, multiplier, eval_samples, synthetic)


def eval_source(rec: Path, data: Data, shard: EvalShard, device: torch.device) -> PipelineEvalSource:
    """Return the evaluation batches of one replica; padding has label -1. Raises like :func:`train_source`.

    Args:
        shard: samples and batch size of this replica.
        device: device that decodes the pictures and receives the batches.
    """

    def finish(tensors: dict[str, Tensor], valid: int) -> dict[str, Tensor]:
        tensors["label"][valid:] = -1
        return _channels_first(tensors)

    return PipelineEvalSource(_runner(eval_pipeline(rec, data, shard, device), data, rec), shard, finish)


def _runner(pipeline: Any, data: Data, rec: Path) -> PipelineRunner:
    return PipelineRunner(pipeline, ("image", "label"), (data.dtype, torch.int64), rec)


def train_pipeline(rec: Path, data: Data, stream: EpochStream, device: torch.device) -> Any:
    """Build the pipeline: read, decode, random-resized crop, mirror, normalise.

    Outputs NHWC pictures and int64 labels (N,).
    """
    batch = stream.micro_batch * data.reader.input_batch_multiplier
    cached = data.reader.cache_mb > 0 and device.type == "cuda"
    pipeline = new_pipeline(batch, device, data.reader, _seed(stream.seed, stream.replica, _TRAIN))
    crop = {"random_area": list(data.facts.crop_area), "random_aspect_ratio": list(data.facts.crop_aspect)}
    side = data.facts.image_size
    with pipeline:
        jpeg, label = fn.readers.mxnet(
            **_reader(rec, data, stream.replicas, stream.replica, cached),
            random_shuffle=True,
            initial_fill=max(1, min(SHUFFLE_BUFFER, stream.train_samples // stream.replicas)),
            pad_last_batch=False,
        )
        if cached:
            decoded = fn.decoders.image(jpeg, **_decoder(data, device), **_cache(data.reader.cache_mb))
            cropped = fn.random_resized_crop(decoded, size=[side, side], **crop, **_resize(device, batch))
        else:
            decoded = fn.decoders.image_random_crop(jpeg, **_decoder(data, device), **crop)
            cropped = fn.resize(decoded, size=[side, side], **_resize(device, batch))
        flip = fn.random.coin_flip(probability=data.facts.mirror)
        pipeline.set_outputs(_normalize(cropped, data, device, mirror=flip), _label(label, device))
    pipeline.build()
    return pipeline


def eval_pipeline(rec: Path, data: Data, shard: EvalShard, device: torch.device) -> Any:
    """Build the pipeline: read, decode, resize the shorter side, crop the centre, normalise.

    Outputs are those of :func:`train_pipeline`. A pass over the padded shard takes exactly ``shard.batches`` runs, so
    that the next evaluation starts at the beginning of the shard.
    """
    pipeline = new_pipeline(shard.batch, device, data.reader, _seed(0, shard.replica, _EVAL))
    with pipeline:
        jpeg, label = fn.readers.mxnet(
            **_reader(rec, data, shard.replicas, shard.replica, False), random_shuffle=False, pad_last_batch=True
        )
        decoded = fn.decoders.image(jpeg, **_decoder(data, device))
        shorter = data.facts.eval_resize
        resized = fn.resize(decoded, resize_shorter=shorter, **_resize(device, shard.batch))
        pipeline.set_outputs(_normalize(resized, data, device), _label(label, device))
    pipeline.build()
    return pipeline


def warm_up(data: Data, device: torch.device, batch: int) -> None:
    """Run every operator once on a synthetic picture to load libraries, memory pools and kernels.

    Reads no file, so that it may run before ``run_start``.
    """
    pictures = synthetic_jpegs(batch, 500, 375)
    pipeline = new_pipeline(batch, device, data.reader, seed=1)
    side = data.facts.image_size
    with pipeline:
        jpeg = fn.external_source(source=lambda: pictures, dtype=types.UINT8, ndim=1)
        whole = fn.decoders.image(jpeg, **_decoder(data, device))
        part = fn.decoders.image_random_crop(jpeg, **_decoder(data, device))
        resize = _resize(device, batch)
        shorter = fn.resize(whole, resize_shorter=data.facts.eval_resize, **resize)
        variants = [
            fn.random_resized_crop(whole, size=[side, side], **resize),
            fn.resize(part, size=[side, side], **resize),
            shorter,
        ]
        pipeline.set_outputs(*(_normalize(variant, data, device) for variant in variants))
    pipeline.build()
    pipeline.run()


def _seed(*key: int) -> int:
    """Return a 31-bit seed for DALI that depends on all numbers of ``key``, e.g. (seed of the run, replica)."""
    return int(sample_generator(*key).integers(1, 2**31 - 1))


def _reader(rec: Path, data: Data, shards: int, shard: int, cached: bool) -> dict[str, Any]:
    return {
        "path": [str(rec)],
        "index_path": [str(rec.with_suffix(".idx"))],
        "num_shards": shards,
        "shard_id": shard,
        "stick_to_shard": True,
        "skip_cached_images": cached,
        "dont_use_mmap": data.reader.dont_use_mmap,
        "lazy_init": True,
        "name": "records",
    }


def _decoder(data: Data, device: torch.device) -> dict[str, Any]:
    load = data.reader.hw_decoder_load
    options = decoder_arguments(device, load, DECODER_WIDTH, DECODER_HEIGHT, PADDING_BYTES)
    return {**options, "bytes_per_sample_hint": DECODED_BYTES} if device.type == "cuda" else options


def _cache(megabytes: int) -> dict[str, Any]:
    return {"cache_type": "threshold", "cache_threshold": 0, "cache_size": megabytes}


def _resize(device: torch.device, batch: int) -> dict[str, Any]:
    """Options for a bilinear resize with an antialiasing (triangular) filter, as in Pillow."""
    options: dict[str, Any] = {"interp_type": types.INTERP_LINEAR, "antialias": True}
    if device.type == "cuda":
        options["bytes_per_sample_hint"] = CROPPED_BYTES
        options["temp_buffer_hint"] = RESIZE_BYTES * batch
    return options


def _normalize(pictures: Any, data: Data, device: torch.device, mirror: Any = 0) -> Any:
    options: dict[str, Any] = {}
    if device.type == "cuda":
        options["bytes_per_sample_hint"] = NORMALIZED_BYTES
    facts = data.facts
    return normalized(
        pictures,
        facts.image_size,
        facts.mean,
        facts.std,
        data.dtype,
        mirror,
        pad_output=True,
        rounding="truncate",
        **options,
    )


def _label(label: Any, device: torch.device) -> Any:
    """Convert the records' float32 labels of shape (1,) to int64 scalars on the device."""
    scalar = fn.squeeze(fn.cast(label, dtype=types.INT64), axes=[0])
    return scalar.gpu() if device.type == "cuda" else scalar


def _channels_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"image": tensors["image"].permute(0, 3, 1, 2), "label": tensors["label"]}
