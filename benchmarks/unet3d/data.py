"""3D U-Net's training data: prepared volumes (see :mod:`benchmarks.unet3d.prepare`) to augmented crops on the device.

The reader's part of a micro-batch is a handful of numbers for each crop; the crops are made of the cached volumes on
the device (:mod:`benchmarks.unet3d.augment`). ``python -m benchmarks.unet3d.data --measure`` times both.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.unet3d.augment import IMPLEMENTATIONS, NOISE_DEVIATION, Crop, Draws, Slab, draw, parameters
from benchmarks.unet3d.cache import VolumeCache, bytes_needed, choose_place
from benchmarks.unet3d.config import Facts
from benchmarks.unet3d.crop import crop_origin
from benchmarks.unet3d.order import ReplicaOrder, VolumeOrder, shares_for
from benchmarks.unet3d.reader_settings import CachePlace, ReaderSettings
from benchmarks.unet3d.volumes import Volumes, open_volumes
from common import config
from common.data.order import MicroBatches
from common.data.source import Block, HostBatch
from common.distributed.layout import Layout
from common.distributed.spatial.split import VolumeSplit
from common.errors import ConfigError, SuiteError
from common.mlperf.fixed import benchmark_settings
from common.ops.implementation import Implementation, OperationRequest, select
from common.precision import DTYPES
from common.ranks import report


@dataclass(frozen=True)
class DataSettings:
    """What the rules fix of the crops, how they are made, and the dtype of the images."""

    facts: Facts
    reader: ReaderSettings
    dtype: torch.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the images in the cache."""
        return self.dtype if self.reader.cache_dtype == "training" else torch.float32

    def slab(self, split: VolumeSplit | None) -> Slab:
        """The part of a crop that one rank makes.

        Raises:
            ConfigError: a crop cannot be dealt to the ranks that share it.
        """
        size = self.facts.input_shape
        if split is None:
            return Slab(size, 0, size[0])
        if size[0] % split.ranks:
            raise ConfigError(f"layout.cp={split.ranks} does not divide the {size[0]} planes of a crop")
        planes = size[0] // split.ranks
        return Slab(size, split.index * planes, planes)

    def augmentation(self, device: torch.device) -> Implementation:
        """What makes the crops.

        Raises:
            UnsupportedImplementation: ``reader.augment`` is unknown or cannot run here.
        """
        return select(IMPLEMENTATIONS, self.reader.augment, OperationRequest(device, self.dtype, channels=1))


class VolumeSource:
    """Training micro-batches of one replica; a :class:`common.data.source.DataSource`.

    Args:
        volumes: the prepared folder.
        settings: crops and reader.
        order: which volumes this replica trains on, and when.
        device: of the crops.
        place: where the volumes are kept: ``device`` or ``host``.
        slab: this rank's part of the crops.
    """

    def __init__(
        self,
        volumes: Volumes,
        settings: DataSettings,
        order: ReplicaOrder,
        device: torch.device,
        place: CachePlace,
        slab: Slab,
    ) -> None:
        self.train_samples, self.eval_samples = len(volumes.train), len(volumes.eval)
        self.stand_in = volumes.stand_in
        self._volumes, self._settings, self._order = volumes, settings, order
        self._device, self._pin_memory = device, device.type == "cuda"
        self._slab = slab
        self._augment = settings.augmentation(device).function
        reader = settings.reader
        where = device if place == "device" else torch.device("cpu")
        self.cache = VolumeCache(volumes, order.volumes, where, settings.cache_dtype, reader.threads)
        self._cutters = ThreadPoolExecutor(reader.threads, "crops") if place == "host" else None

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``: what :meth:`prepare` needs to make the crops.

        Raises:
            DataError: a volume cannot be read, or is not what the manifest says.
            ConfigError: the block's epochs are not this order's.
        """
        first, count = self._order.micro_batches(block)
        if start < count:
            self.cache.start(self._order.first_use(first + start))
        samples = self._order.mine.micro_batch * self._order.mine.replicas
        for position in range(start, count):
            crops = [self._crop(step, slot) for step, slot in self._order.samples(first + position)]
            yield HostBatch(self._tensors(crops), samples, position)

    def prepare(self, batch: HostBatch) -> dict[str, Tensor]:
        """Make the crops on the device, on the current stream.

        Returns:
            ``image`` (N, 1, D, H, W) in channels_last_3d memory, ``label`` (N, D, H, W) uint8; of split crops this
            rank's slab.
        """
        tensors = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.tensors.items()}
        image, label = self._augment(
            tensors.get("images", self.cache.images),
            tensors.get("labels", self.cache.labels),
            tensors["addresses"],
            tensors["intensities"],
            self._slab,
            self._settings.dtype,
        )
        return {"image": image, "label": label}

    def close(self) -> None:
        """Stop the threads and free the volumes."""
        self.cache.close()
        if self._cutters is not None:
            self._cutters.shutdown()

    def _crop(self, step: int, slot: int) -> Crop:
        """Draw a sample. Nothing but its own number decides, whatever has been read already."""
        volume = self._order.order.volume(step, slot)
        generator = self._order.order.generator(step, slot)
        facts, reader = self._settings.facts, self._settings.reader
        shape = self._volumes.train[volume].shape
        origin = crop_origin(generator, shape, facts.input_shape, facts.oversampling, lambda: self.cache.boxes(volume))
        draws = draw(generator, facts, reader.brightness, reader.noise)
        return Crop(self.cache.wait(volume), shape, origin, draws)

    def _tensors(self, crops: list[Crop]) -> dict[str, Tensor]:
        if self._cutters is None:
            return parameters(crops, self._slab, self._pin_memory)
        shape, voxels = self._slab.shape, self._slab.voxels
        images = torch.empty(len(crops) * voxels, dtype=self.cache.images.dtype, pin_memory=self._pin_memory)
        labels = torch.empty(len(crops) * voxels, dtype=torch.uint8, pin_memory=self._pin_memory)

        def cut(number: int) -> None:
            for source, target in ((self.cache.images, images), (self.cache.labels, labels)):
                target[number * voxels :][:voxels].view(shape).copy_(self._slab.cut(source, crops[number]))

        list(self._cutters.map(cut, range(len(crops))))
        staged = [Crop(number * voxels, shape, (0, 0, 0), crop.draws) for number, crop in enumerate(crops)]
        whole = Slab(shape, 0, shape[0])  # what was cut is all that there is
        return {"images": images, "labels": labels, **parameters(staged, whole, self._pin_memory)}


def open_train(
    root: Path,
    settings: DataSettings,
    layout: Layout,
    micro_batch: int,
    accumulation: int = 1,
    split: VolumeSplit | None = None,
) -> VolumeSource:
    """Open the training data under ``root`` for this rank; after ``run_start``.

    Args:
        root: prepared data.
        settings: crops and reader.
        layout: the replica (axis dp), the device and the seed.
        micro_batch: crops of a micro-batch of one replica.
        accumulation: micro-batches per step of a replica.
        split: of a crop over ranks; None where each makes whole ones.

    Raises:
        DataError: the folder is incomplete or damaged, or a volume is smaller than a crop.
        ConfigError: the shares divide volumes or batch not evenly, or the volumes do not fit into memory.
    """
    volumes = open_volumes(root, settings.facts.input_shape)
    replicas = layout.size("dp")
    mine = MicroBatches(micro_batch, accumulation, replicas, layout.index("dp"))
    shares = shares_for(settings.reader.shares, len(volumes.train), replicas)
    order = ReplicaOrder(VolumeOrder(len(volumes.train), micro_batch * mine.lanes, shares, layout.seed), mine)
    needed = bytes_needed(volumes, order.volumes, settings.cache_dtype)
    place = choose_place(settings.reader.cache, needed, settings.reader.cache_gb, layout.device)
    return VolumeSource(volumes, settings, order, layout.device, place, settings.slab(split))


def order_of_data(reader: ReaderSettings, train_samples: int, replicas: int) -> str:
    """What decides the order and the look of samples beside seed and batch, for checkpoints."""
    shares = shares_for(reader.shares, train_samples, replicas)
    return f"{shares} shares, brightness {reader.brightness}, noise {reader.noise}, images {reader.cache_dtype}"


def warm_up(settings: DataSettings, layout: Layout, micro_batch: int, split: VolumeSplit | None = None) -> None:
    """Make a micro-batch of a made-up volume, which compiles the kernel; before ``run_start``."""
    slab, device = settings.slab(split), layout.device
    volume = torch.zeros(math.prod(slab.size), device=device)
    draws = Draws((True, True, True), 1.0, NOISE_DEVIATION, 0)
    tensors = parameters([Crop(0, slab.size, (0, 0, 0), draws)] * micro_batch, slab, device.type == "cuda")
    given = (volume.to(settings.cache_dtype), volume.to(torch.uint8), *(t.to(device) for t in tensors.values()))
    settings.augmentation(device).function(*given, slab, settings.dtype)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Measurement:
    """What :func:`measure` saw.

    Attributes:
        first_seconds: from opening to the first step's crops.
        read_seconds: from opening until all volumes of this rank were in memory.
        read_bytes: of their files.
        reading_wait: seconds that the slowest step but the first waited until then.
        samples_per_second: afterwards, while the reader was asked for crops; the pauses do not count.
        longest_wait: seconds that the slowest of these steps waited.
    """

    first_seconds: float
    read_seconds: float
    read_bytes: int
    reading_wait: float
    samples_per_second: float
    longest_wait: float


def measure(
    root: Path, settings: DataSettings, layout: Layout, micro_batch: int, accumulation: int, steps: int, pause: float
) -> Measurement:
    """Make global batches of one replica, ``pause`` seconds apart as training would: while volumes are read, and
    ``steps`` more."""
    warm_up(settings, layout, micro_batch)
    began = time.perf_counter()
    source = open_train(root, settings, layout, micro_batch, accumulation)
    samples = micro_batch * layout.size("dp") * accumulation
    batches = source.batches(Block(0, 1, 0, 0, 1_000_000 * samples))

    def step() -> float:
        asked = time.perf_counter()
        for _ in range(accumulation):
            source.prepare(next(batches))
        if layout.device.type == "cuda":
            torch.cuda.synchronize(layout.device)
        waited = time.perf_counter() - asked
        time.sleep(pause)
        return waited

    try:
        first = time.perf_counter() - began + step()
        reading = [0.0]
        while not source.cache.complete:
            reading.append(step())
        read_seconds = source.cache.read_seconds
        waits = [step() for _ in range(steps)]
    finally:
        source.close()
    rate = steps * accumulation * micro_batch / sum(waits)
    return Measurement(first, read_seconds, source.cache.read_bytes, max(reading), rate, max(waits))


def main() -> None:
    """Time the reader: ``python -m benchmarks.unet3d.data --measure --data-dir DATA``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unet3d.data", description=measure.__doc__)
    parser.add_argument("--measure", action="store_true", required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--crop", type=int, nargs=3, help="voxels; default: the rules'")
    parser.add_argument("--cache", choices=("auto", "device", "host"), default="auto")
    parser.add_argument("--cache-dtype", choices=("fp32", "training"), default="fp32")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--augment", choices=("auto", *IMPLEMENTATIONS), default="auto")
    parser.add_argument("--micro-batch", type=int, default=7)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1, help="of which the first one is measured")
    parser.add_argument("--shares", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause-ms", type=float, default=0.0, help="between steps; a training step is 92 ms")
    args = parser.parse_args()
    try:
        print(_measured(args))
    except SuiteError as error:
        report(error)
        sys.exit(error.exit_code)


def _measured(args: argparse.Namespace) -> str:
    facts = config.build(Facts, benchmark_settings("unet3d")["facts"], "benchmark.facts")
    if args.crop:
        facts = replace(facts, input_shape=tuple(args.crop))
    reader = ReaderSettings(
        args.shares, args.cache, 0.0, args.cache_dtype, args.threads, "nvidia", "nvidia", args.augment
    )
    settings = DataSettings(facts, reader, DTYPES[args.precision])
    layout = Layout({"dp": args.replicas}, device=args.device)
    seen = measure(
        args.data_dir, settings, layout, args.micro_batch, args.accumulation, args.steps, args.pause_ms / 1e3
    )
    return (
        f"{settings.augmentation(layout.device).name}, {args.accumulation} x {args.micro_batch} crops a step on "
        f"{args.device}: {seen.samples_per_second:.0f} samples/s, the slowest of {args.steps} steps waited "
        f"{seen.longest_wait * 1e3:.1f} ms; first step after {seen.first_seconds * 1e3:.0f} ms; "
        f"{seen.read_bytes / 1e9:.2f} GB read in {seen.read_seconds:.2f} s, in which the slowest step waited "
        f"{seen.reading_wait * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
