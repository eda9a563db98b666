"""ResNet-50's own configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.errors import ConfigError
from common.ranges import require


@dataclass(frozen=True)
class Facts:
    """What the rules fix beside the target: classes, pictures, batch norm. Pixel values count from 0 to 255."""

    classes: int
    image_size: int
    eval_resize: int
    crop_area: tuple[float, float]
    crop_aspect: tuple[float, float]
    mirror: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    bn_epsilon: float
    bn_momentum: float

    def __post_init__(self) -> None:
        area, aspect = self.crop_area, self.crop_aspect
        require(
            "benchmark.facts",
            self,
            classes=(self.classes >= 1, "at least 1"),
            image_size=(self.image_size >= 1, "at least 1 px"),
            eval_resize=(self.eval_resize >= self.image_size, f"at least image_size={self.image_size}"),
            crop_area=(0 < area[0] <= area[1] <= 1, "two shares above 0, ascending"),
            crop_aspect=(0 < aspect[0] <= aspect[1], "two positive ratios, ascending"),
            mirror=(0 <= self.mirror <= 1, "a probability"),
            std=(min(self.std) > 0, "positive"),
            bn_epsilon=(self.bn_epsilon > 0, "positive"),
            bn_momentum=(0 < self.bn_momentum <= 1, "a share above 0"),
        )


@dataclass(frozen=True)
class Hparams:
    """The tunable hyperparameters: the rows of the rules' table for ``resnet``.

    Attributes:
        source: where the set was published.
        variant: of LARS: ``nvidia`` keeps the learning rate outside the momentum buffer of convolutions and classifier,
            decays the classifier's bias and counts schedule steps from 1; ``reference`` is the TensorFlow 2 reference.
            SGD is always the reference's.
        lars_eta: LARS's trust coefficient.
        warmup_epochs, epochs: of the learning-rate schedule; training goes on after them at the end rate.
        bn_group: ranks that share batch-norm statistics.
    """

    source: str
    global_batch_size: int
    optimizer: Literal["lars", "sgd"]
    variant: Literal["nvidia", "reference"]
    base_learning_rate: float
    end_learning_rate: float
    decay_power: int
    warmup_epochs: int
    epochs: int
    momentum: float
    weight_decay: float
    lars_eta: float
    lars_epsilon: float
    label_smoothing: float
    truncated_normal: bool
    bn_group: int

    @property
    def nvidia(self) -> bool:
        """Whether optimizer and schedule are NVIDIA's; otherwise they are the reference's."""
        return self.optimizer == "lars" and self.variant == "nvidia"

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ConfigError(
                f"hparams.warmup_epochs={self.warmup_epochs}: not negative, and below hparams.epochs={self.epochs}, "
                "so that the learning rate can decay"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"hparams.label_smoothing={self.label_smoothing}: a share, at least 0 and below 1")


@dataclass(frozen=True)
class ModelConfig:
    """The network's size and how its operations run. The benchmark's model has width 64."""

    width: int
    input_channels: Literal[3, 4]
    batch_norm: str

    def __post_init__(self) -> None:
        require("model", self, width=(self.width >= 1, "at least 1 channel"))


@dataclass(frozen=True)
class ReaderConfig:
    """How pictures are read.

    Attributes:
        reader: ``dali``, ``torchvision``, or ``auto``: DALI where it is installed.
        threads: CPU threads of the reader.
        prefetch: batches that the reader works ahead.
        hw_decoder_load: share of the pictures for the GPU's JPEG engine.
        cache_mb: GPU memory for decoded training pictures, per rank; 0 decodes only what a crop needs.
        eval_cache_mb: device memory for finished validation pictures, per rank: all of them are kept or none.
        input_batch_multiplier: micro-batches that DALI decodes together.
        dont_use_mmap: read instead of mapping the files; for network file systems.
        pinned_pool_mb: pinned host memory that DALI takes at once, per rank; 0 leaves it to DALI.
        eval_batch: pictures of one evaluation batch on one rank.
    """

    reader: Literal["auto", "dali", "torchvision"]
    threads: int
    prefetch: int
    hw_decoder_load: float
    cache_mb: int
    eval_cache_mb: int
    input_batch_multiplier: int
    dont_use_mmap: bool
    pinned_pool_mb: int
    eval_batch: int

    def __post_init__(self) -> None:
        require(
            "reader",
            self,
            threads=(self.threads >= 1, "at least 1"),
            prefetch=(self.prefetch >= 1, "at least 1 batch"),
            hw_decoder_load=(0 <= self.hw_decoder_load <= 1, "a share"),
            cache_mb=(self.cache_mb >= 0, "not negative"),
            eval_cache_mb=(self.eval_cache_mb >= 0, "not negative"),
            input_batch_multiplier=(self.input_batch_multiplier >= 1, "at least 1"),
            pinned_pool_mb=(self.pinned_pool_mb >= 0, "not negative"),
            eval_batch=(self.eval_batch >= 1, "at least 1 picture"),
        )


@dataclass(frozen=True)
class ResNetConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
