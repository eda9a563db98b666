"""Configuration of ResNet-50."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.resnet.model import Architecture
from common.config.ranges import (
    AtLeast,
    Each,
    NotNegative,
    Positive,
    Probability,
    Range,
    ShareAboveZero,
    ShareBelowOne,
)
from common.errors import ConfigError
from common.ops.batch_norm import BATCH_NORM
from common.ops.convolution import CONVOLUTION
from common.ops.operation import AUTO, REFERENCE, Operation, all_implementations
from common.optim.hparams import LarsHparams
from common.vision.pictures import ReaderConfig

OPERATIONS: dict[str, Operation] = {"batch_norm": BATCH_NORM, "convolution_moments": CONVOLUTION}
"""Operations whose implementation ``model.implementations`` can choose."""

Area = Range("two shares above 0, ascending", lambda area: 0 < area[0] <= area[1] <= 1)
Aspect = Range("two positive ratios, ascending", lambda aspect: 0 < aspect[0] <= aspect[1])
Smoothing = Range("a share, at least 0 and below 1", ShareBelowOne.holds)


@dataclass(frozen=True)
class Facts:
    """Constants of the rules, except the target: classes, pictures, batch norm. Pixel values are 0 to 255."""

    classes: Annotated[int, AtLeast(1)]
    image_size: Annotated[int, AtLeast(1, "at least 1 px")]
    eval_resize: int
    crop_area: Annotated[tuple[float, float], Area]
    crop_aspect: Annotated[tuple[float, float], Aspect]
    mirror: Annotated[float, Probability]
    mean: tuple[float, float, float]
    std: Annotated[tuple[float, float, float], Each(Positive)]
    bn_epsilon: Annotated[float, Positive]
    bn_momentum: Annotated[float, ShareAboveZero]

    def __post_init__(self) -> None:
        if self.eval_resize < self.image_size:
            raise ConfigError(f"eval_resize={self.eval_resize}: at least image_size={self.image_size}")

    def architecture(self, width: int) -> Architecture:
        """Return the shape of a network whose first stage has ``width`` channels."""
        return Architecture(width, self.classes, self.bn_epsilon, self.bn_momentum)


@dataclass(frozen=True)
class Hparams(LarsHparams):
    """Tunable hyperparameters: the rows for ``resnet`` in the table of the rules.

    Attributes:
        variant: LARS variant. ``reference`` is the TensorFlow 2 reference. ``nvidia`` keeps the learning rate outside
            the momentum buffer of convolution and classifier weights, decays the classifier's bias and counts schedule
            steps from 1. SGD always follows the reference.
        warmup_epochs, epochs: epochs of the learning-rate schedule. Later training uses the end rate.
        bn_group: number of ranks that share batch-norm statistics.
    """

    optimizer: Literal["lars", "sgd"]
    variant: Literal["nvidia", "reference"]
    end_learning_rate: Annotated[float, NotNegative]
    decay_power: int
    warmup_epochs: int
    epochs: int
    label_smoothing: Annotated[float, Smoothing]
    truncated_normal: bool
    bn_group: int

    @property
    def nvidia(self) -> bool:
        """Whether optimizer and schedule follow NVIDIA's variant instead of the reference."""
        return self.optimizer == "lars" and self.variant == "nvidia"

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ConfigError(
                f"warmup_epochs={self.warmup_epochs}: not negative, and below hparams.epochs={self.epochs}, so that "
                "the learning rate can decay"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Size of the network and implementations of its operations. The benchmark's model has width 64.

    Attributes:
        implementations: operation name to implementation. Missing operations use ``auto``.
    """

    width: Annotated[int, AtLeast(1, "at least 1 channel")]
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))
        if self.implementations["convolution_moments"] != AUTO and self.implementations["batch_norm"] == REFERENCE:
            raise ConfigError(
                "implementations.batch_norm=reference: only Triton's batch norm reads the moments of "
                f"implementations.convolution_moments={self.implementations['convolution_moments']}"
            )


@dataclass(frozen=True, kw_only=True)
class CachedReaderConfig(ReaderConfig):
    """Options of the data reader.

    Attributes:
        cache_mb: GPU memory per rank for decoded training pictures. With 0, only the crop of a picture is decoded.
        eval_cache_mb: device memory per rank for preprocessed validation pictures. Caches either all or none.
        dont_use_mmap: read files instead of memory-mapping them, for network file systems.
    """

    cache_mb: Annotated[int, NotNegative]
    eval_cache_mb: Annotated[int, NotNegative]
    dont_use_mmap: bool


@dataclass(frozen=True)
class ResNetConfig:
    """ResNet-50's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: CachedReaderConfig
