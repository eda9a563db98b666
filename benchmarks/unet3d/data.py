"""Training data of 3D U-Net: augmented crops on the device from prepared volumes (:mod:`benchmarks.unet3d.prepare`).

The reader delivers only a few numbers per crop; the device makes the crops from the cached volumes
(:mod:`benchmarks.unet3d.ops.augment`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.unet3d.cache import VolumeCache, bytes_needed, choose_location
from benchmarks.unet3d.config import CacheLocation, Facts, Variant, VolumeReaderSettings
from benchmarks.unet3d.crop import BRIGHTNESS_RANGE, NOISE_DEVIATION, CropDraws, Slab, VolumeCrop, crop_origin
from benchmarks.unet3d.ops.augment import AUGMENT, parameters
from benchmarks.unet3d.volume_order import ReplicaOrder, VolumeOrder, shares_for
from benchmarks.unet3d.volumes import Volumes, open_volumes
from common.data.batches import Block, HostBatch
from common.data.order import MicroBatches
from common.distributed.layout import Layout
from common.distributed.spatial.split import VolumeSplit
from common.errors import ConfigError
from common.ops.operation import Choice, OperationRequest, select


def draw(generator: np.random.Generator, facts: Facts, variant: Variant) -> CropDraws:
    """Draw the augmentation of a crop.

    Args:
        facts: gives the probabilities.
        variant: ``nvidia`` multiplies by f from :data:`BRIGHTNESS_RANGE`, ``reference`` by 1 + f. The standard
            deviation of the noise is :data:`NOISE_DEVIATION` with ``nvidia``, and uniform below it with
            ``reference``.
    """
    d, h, w = (bool(generator.random() < facts.flip_probability) for _ in range(3))
    scale = 1.0
    if generator.random() < facts.brightness_probability:
        scale = generator.uniform(*BRIGHTNESS_RANGE) + (variant == "reference")
    deviation = 0.0
    if generator.random() < facts.noise_probability:
        deviation = NOISE_DEVIATION if variant == "nvidia" else generator.uniform(0.0, NOISE_DEVIATION)
    return CropDraws((d, h, w), scale, deviation, int(generator.integers(2**63)))


@dataclass(frozen=True)
class VolumeDataSettings:
    """Settings of the crops and the reader.

    Attributes:
        variant: ``nvidia`` or ``reference``, the rules of the augmentation.
        dtype: dtype of the images in a batch.
        implementations: ``model.implementations``; only ``augment`` is used.
    """

    facts: Facts
    reader: VolumeReaderSettings
    variant: Variant
    dtype: torch.dtype
    implementations: Mapping[str, str] = field(default_factory=dict)

    def slab(self, split: VolumeSplit | None) -> Slab:
        """Return the planes of each crop that this rank computes; all planes if ``split`` is None.

        Raises:
            ConfigError: the planes cannot be divided equally among the ranks.
        """
        size = self.facts.input_shape
        if split is None:
            return Slab(size, 0, size[0])
        if size[0] % split.ranks:
            raise ConfigError(f"layout.cp={split.ranks} does not divide the {size[0]} planes of a crop")
        planes = size[0] // split.ranks
        return Slab(size, split.index * planes, planes)

    def augmentation(self, device: torch.device) -> Choice:
        """Return the implementation that makes the crops.

        Raises:
            UnsupportedImplementation: it cannot run on ``device``.
        """
        request = OperationRequest(device, self.dtype)
        return select(self.implementations, "augment", AUGMENT, request)


class VolumeSource:
    """Training micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    Args:
        order: order of this replica's volumes.
        location: memory that caches the volumes: ``device`` or ``host``.
        slab: planes of each crop that this rank computes.
    """

    def __init__(
        self,
        volumes: Volumes,
        settings: VolumeDataSettings,
        order: ReplicaOrder,
        device: torch.device,
        location: CacheLocation,
        slab: Slab,
    ) -> None:
        self.train_samples, self.eval_samples = len(volumes.train), len(volumes.eval)
        self.synthetic = volumes.synthetic
        self._volumes, self._settings, self._order = volumes, settings, order
        self._device, self._pin_memory = device, device.type == "cuda"
        self._slab = slab
        self._augment = settings.augmentation(device).function
        reader = settings.reader
        where = device if location == "device" else torch.device("cpu")
        self.cache = VolumeCache(volumes, order.volumes, where, reader.threads)
        self._cutters = ThreadPoolExecutor(reader.threads, "crops") if location == "host" else None

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``, as inputs of :meth:`prepare`.

        Raises:
            DataError: a volume cannot be read or does not match the manifest.
            ConfigError: the epochs of ``block`` differ from those of the order.
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
            ``image`` (N, 1, D, H, W) in channels_last_3d memory, ``label`` (N, D, H, W) uint8; only this rank's
                planes if crops are split.
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

    def _crop(self, step: int, slot: int) -> VolumeCrop:
        """Draw a sample. The result depends only on the sample's number, not on earlier samples."""
        volume = self._order.order.volume(step, slot)
        generator = self._order.order.generator(step, slot)
        facts = self._settings.facts
        shape = self._volumes.train[volume].shape
        origin = crop_origin(generator, shape, facts.input_shape, facts.oversampling, lambda: self.cache.boxes(volume))
        draws = draw(generator, facts, self._settings.variant)
        return VolumeCrop(self.cache.wait(volume), shape, origin, draws)

    def _tensors(self, crops: list[VolumeCrop]) -> dict[str, Tensor]:
        if self._cutters is None:
            return parameters(crops, self._slab, self._pin_memory)
        shape, voxels = self._slab.shape, self._slab.voxels
        images = torch.empty(len(crops) * voxels, dtype=self.cache.images.dtype, pin_memory=self._pin_memory)
        labels = torch.empty(len(crops) * voxels, dtype=torch.uint8, pin_memory=self._pin_memory)

        def cut(number: int) -> None:
            for source, target in ((self.cache.images, images), (self.cache.labels, labels)):
                target[number * voxels :][:voxels].view(shape).copy_(self._slab.cut(source, crops[number]))

        list(self._cutters.map(cut, range(len(crops))))
        staged = [VolumeCrop(number * voxels, shape, (0, 0, 0), crop.draws) for number, crop in enumerate(crops)]
        whole = Slab(shape, 0, shape[0])  # only the slab was copied
        return {"images": images, "labels": labels, **parameters(staged, whole, self._pin_memory)}


def open_train(
    root: Path,
    settings: VolumeDataSettings,
    layout: Layout,
    micro_batch: int,
    accumulation: int = 1,
    split: VolumeSplit | None = None,
) -> VolumeSource:
    """Open the training data under ``root`` for this rank; call it after ``run_start``.

    Args:
        root: folder of the prepared data.
        layout: gives the replica (axis dp), the device and the seed.
        micro_batch: crops per micro-batch of one replica.
        accumulation: micro-batches per step of a replica.
        split: ranks that share each crop; None if every rank makes whole crops.

    Raises:
        DataError: the folder is incomplete or damaged, or a volume is smaller than a crop.
        ConfigError: volumes or batch cannot be divided equally among the shares, or the volumes do not fit into memory.
    """
    volumes = open_volumes(root, settings.facts.input_shape)
    replicas = layout.size("dp")
    mine = MicroBatches(micro_batch, accumulation, replicas, layout.index("dp"))
    shares = shares_for(settings.reader.shares, len(volumes.train), replicas)
    order = ReplicaOrder(VolumeOrder(len(volumes.train), micro_batch * mine.streams, shares, layout.seed), mine)
    needed = bytes_needed(volumes, order.volumes)
    location = choose_location(settings.reader.cache, needed, layout.device)
    return VolumeSource(volumes, settings, order, layout.device, location, settings.slab(split))


def order_of_data(reader: VolumeReaderSettings, variant: Variant, train_samples: int, replicas: int) -> str:
    """Return, as text, the settings that determine the samples, besides seed and batch size; checkpoints store them.

    Args:
        variant: variant of the augmentation.
        train_samples: number of training volumes.
        replicas: data-parallel ranks.
    """
    shares = shares_for(reader.shares, train_samples, replicas)
    return f"{shares} shares, augmentation {variant}"


def warm_up(settings: VolumeDataSettings, layout: Layout, micro_batch: int, split: VolumeSplit | None = None) -> None:
    """Make a micro-batch from a synthetic volume, to compile the kernel before ``run_start``."""
    slab, device = settings.slab(split), layout.device
    volume = torch.zeros(math.prod(slab.size), device=device)
    draws = CropDraws((True, True, True), 1.0, NOISE_DEVIATION, 0)
    tensors = parameters([VolumeCrop(0, slab.size, (0, 0, 0), draws)] * micro_batch, slab, device.type == "cuda")
    given = (volume, volume.to(torch.uint8), *(t.to(device) for t in tensors.values()))
    settings.augmentation(device).function(*given, slab, settings.dtype)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
