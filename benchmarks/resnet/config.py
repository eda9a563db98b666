"""ResNet-50's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.resnet.model import Architecture
from common.config.ranges import (
    AtLeast,
    Each,
    FiniteNotNegative,
    NotNegative,
    Positive,
    Probability,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
)
from common.errors import ConfigError
from common.ops.batch_norm import BATCH_NORM
from common.ops.convolution import CONVOLUTION
from common.ops.operation import AUTO, REFERENCE, Operation, all_implementations
from common.optim.hparams import LarsHparams

OPERATIONS: dict[str, Operation] = {"batch_norm": BATCH_NORM, "convolution_moments": CONVOLUTION}
"""Operations that ``model.implementations`` can choose an implementation of."""

Area = Range("two shares above 0, ascending", lambda area: 0 < area[0] <= area[1] <= 1)
Aspect = Range("two positive ratios, ascending", lambda aspect: 0 < aspect[0] <= aspect[1])
Smoothing = Range("a share, at least 0 and below 1", ShareBelowOne.holds)


@dataclass(frozen=True)
class Facts:
    """What the rules fix beside the target: classes, pictures, batch norm. Pixel values count from 0 to 255."""

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
        """The shape of a network of so many channels."""
        return Architecture(width, self.classes, self.bn_epsilon, self.bn_momentum)


@dataclass(frozen=True)
class Hparams(LarsHparams):
    """The tunable hyperparameters: the rows of the rules' table for ``resnet``.

    Attributes:
        variant: of LARS: ``nvidia`` keeps the learning rate outside the momentum buffer of the weights of convolutions
            and classifier, decays the classifier's bias and counts schedule steps from 1; ``reference`` is the
            TensorFlow 2 reference. SGD is always the reference's.
        warmup_epochs, epochs: of the learning-rate schedule; training goes on after them at the end rate.
        bn_group: ranks that share batch-norm statistics.
    """

    optimizer: Literal["lars", "sgd"]
    variant: Literal["nvidia", "reference"]
    end_learning_rate: Annotated[float, FiniteNotNegative]
    decay_power: int
    warmup_epochs: int
    epochs: int
    label_smoothing: Annotated[float, Smoothing]
    truncated_normal: bool
    bn_group: int

    @property
    def nvidia(self) -> bool:
        """Whether optimizer and schedule are NVIDIA's; otherwise they are the reference's."""
        return self.optimizer == "lars" and self.variant == "nvidia"

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ConfigError(
                f"warmup_epochs={self.warmup_epochs}: not negative, and below hparams.epochs={self.epochs}, so that "
                "the learning rate can decay"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The network's size and how its operations run. The benchmark's model has width 64.

    Attributes:
        implementations: name of an operation to the implementation to use; ``auto`` for those left out.
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


@dataclass(frozen=True)
class ReaderConfig:
    """How pictures are read.

    Attributes:
        threads: CPU threads of the reader.
        prefetch: batches that the reader works ahead.
        hw_decoder_load: share of the pictures for the GPU's JPEG engine.
        cache_mb: GPU memory for decoded training pictures, per rank; 0 decodes only what a crop needs.
        eval_cache_mb: device memory for finished validation pictures, per rank: all of them are kept or none.
        input_batch_multiplier: micro-batches that DALI decodes together.
        dont_use_mmap: read instead of mapping the files; for network file systems.
        eval_batch: pictures of one evaluation batch on one rank.
        reader: ``dali``, ``torchvision``, or ``auto``: DALI where it is installed.
    """

    threads: Annotated[int, AtLeast(1)]
    prefetch: Annotated[int, AtLeast(1, "at least 1 batch")]
    hw_decoder_load: Annotated[float, Share]
    cache_mb: Annotated[int, NotNegative]
    eval_cache_mb: Annotated[int, NotNegative]
    input_batch_multiplier: Annotated[int, AtLeast(1)]
    dont_use_mmap: bool
    eval_batch: Annotated[int, AtLeast(1, "at least 1 picture")]
    reader: Literal["auto", "dali", "torchvision"] = "auto"


@dataclass(frozen=True)
class ResNetConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
