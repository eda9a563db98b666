"""Configuration keys of 3D U-Net."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.unet3d.model import HALVINGS, UNet3DArchitecture
from benchmarks.unet3d.model import OPERATIONS as NETWORK_OPERATIONS
from benchmarks.unet3d.ops.augment import AUGMENT
from benchmarks.unet3d.ops.dice_cross_entropy import DICE_CROSS_ENTROPY
from common.config.ranges import (
    AtLeast,
    Finite,
    NotNegative,
    Positive,
    Probability,
    Range,
    ShareBelowOne,
)
from common.config.sections import NetworkConfig
from common.ops.operation import AUTO, Operation
from common.optim.hparams import SgdHparams

CacheLocation = Literal["auto", "device", "host"]


@dataclass(frozen=True)
class VolumeReaderSettings:
    """Options of the reader that the rules do not fix.

    Attributes:
        shares: equal parts of the training set that never mix. With one share per replica, a replica reads and caches
            only its own volumes; with 1, every replica may need every volume; 0 chooses one per replica if that
            divides the volumes, otherwise 1. The order depends on shares and seed, not on the number of replicas.
        cache: location of the volumes: ``device``, or ``host`` memory, where the CPU cuts the crops; ``auto`` chooses
            the device if the volumes fit into half of its free memory. The crops are the same.
        threads: threads that read volumes; the same number cuts crops in host memory.
    """

    shares: Annotated[int, AtLeast(0, "a number of shares, or 0 to have it chosen")]
    cache: CacheLocation
    threads: Annotated[int, AtLeast(1)]


Variant = Literal["nvidia", "reference"]
"""Selects the behaviour of NVIDIA's submissions or of the reference, where they differ and the rules allow both."""

STEP = 2**HALVINGS
"""Required divisor of the sizes of a crop."""

Crop = Range(
    f"multiples of {STEP}, and not all of them {STEP}: a single voxel in the end has no instance norm",
    lambda shape: all(size >= STEP and size % STEP == 0 for size in shape) and max(shape) > STEP,
)


OPERATIONS: dict[str, Operation] = {
    **NETWORK_OPERATIONS,
    "dice_cross_entropy": DICE_CROSS_ENTROPY,
    "augment": AUGMENT,
}
"""Operations whose implementation can be chosen in ``model.implementations``."""


@dataclass(frozen=True)
class Facts(UNet3DArchitecture):
    """Constants that the rules fix besides the target: the network, the crops, the augmentation and the sliding window.

    Attributes:
        dice_smooth: added to numerator and denominator of the Dice coefficient.
        input_shape: voxels (D, H, W) of a training crop and of an evaluation window.
        overlap: overlap of neighbouring windows, as a fraction of their size.
        padding_value: value of voxels that are padded to images whose size is no multiple of the window stride.
        oversampling: fraction of the crops that contain an object.
        flip_probability: probability per axis.
        brightness_probability, noise_probability: probability per sample.
    """

    dice_smooth: Annotated[float, Positive]
    input_shape: Annotated[tuple[int, int, int], Crop]
    overlap: Annotated[float, ShareBelowOne]
    padding_value: Annotated[float, Finite]
    oversampling: Annotated[float, Probability]
    flip_probability: Annotated[float, Probability]
    brightness_probability: Annotated[float, Probability]
    noise_probability: Annotated[float, Probability]


@dataclass(frozen=True)
class Hparams(SgdHparams):
    """The tunable hyperparameters: the rows for ``unet3d`` in the table of the rules; a sample is a crop.

    Attributes:
        variant: ``reference`` raises the learning rate once per epoch during the warm-up. ``nvidia`` raises it every
            step, starts from a counter that includes the untimed steps before ``run_start``, and scales gradients by
            the rate before they enter the momentum buffer.
        augmentation: ``reference`` multiplies intensities by 1 + f, ``nvidia`` by f, f uniform in [0.7, 1.3]. The
            standard deviation of the noise is uniform in [0, 0.1] with ``reference``, and 0.1 with ``nvidia``.
        initial_learning_rate: learning rate at the start of the warm-up.
        warmup_epochs: length of the warm-up; the learning rate is constant afterwards.
    """

    optimizer: Literal["sgd"]
    variant: Variant
    augmentation: Variant
    initial_learning_rate: Annotated[float, NotNegative]
    warmup_epochs: Annotated[int, NotNegative]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Options of the network.

    Attributes:
        halo: method by which the ranks of a split volume exchange planes.
    """

    operations = OPERATIONS
    halo: str = AUTO


@dataclass(frozen=True)
class SlidingWindowConfig:
    """Options of the evaluation.

    Attributes:
        batch: windows per forward pass.
    """

    batch: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class UNet3DConfig:
    """3D U-Net's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: VolumeReaderSettings
    sliding_window: SlidingWindowConfig
