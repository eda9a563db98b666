"""3D U-Net's own configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from benchmarks.unet3d.reader_settings import ReaderSettings
from common.ranges import require

HALVINGS = 5
"""Strided convolutions of the network: sizes are multiples of 2**HALVINGS."""


@dataclass(frozen=True)
class Facts:
    """What the rules fix beside the target: the network, the crops, the augmentation and the sliding window.

    Attributes:
        classes: with the background, which is class 0.
        filters: channels of the input block and of the four levels below it.
        norm_epsilon: added to the variance of every instance norm.
        dice_smooth: added to numerator and denominator of the Dice coefficient.
        input_shape: voxels of a training crop and of an evaluation window.
        overlap: of neighbouring windows, as a share of their size.
        padding_value: of images whose size is no multiple of the windows' distance.
        oversampling: share of the crops that hold an object.
        flip_probability: on each axis.
        brightness_probability, noise_probability: of each sample.
    """

    classes: int
    filters: tuple[int, ...]
    norm_epsilon: float
    dice_smooth: float
    input_shape: tuple[int, int, int]
    overlap: float
    padding_value: float
    oversampling: float
    flip_probability: float
    brightness_probability: float
    noise_probability: float

    def __post_init__(self) -> None:
        probability = "a probability"
        step = 2**HALVINGS
        require(
            "benchmark.facts",
            self,
            classes=(self.classes == 3, "3: background, kidney and tumour"),
            filters=(len(self.filters) == HALVINGS and min(self.filters) >= 1, f"{HALVINGS} positive numbers"),
            norm_epsilon=(0 < self.norm_epsilon < math.inf, "positive and finite"),
            dice_smooth=(0 < self.dice_smooth < math.inf, "positive and finite"),
            input_shape=(
                all(size >= step and size % step == 0 for size in self.input_shape) and max(self.input_shape) > step,
                f"multiples of {step}, and not all of them {step}: a single voxel in the end has no instance norm",
            ),
            overlap=(0 <= self.overlap < 1, "a share below 1"),
            padding_value=(math.isfinite(self.padding_value), "finite"),
            oversampling=(0 <= self.oversampling <= 1, probability),
            flip_probability=(0 <= self.flip_probability <= 1, probability),
            brightness_probability=(0 <= self.brightness_probability <= 1, probability),
            noise_probability=(0 <= self.noise_probability <= 1, probability),
        )


@dataclass(frozen=True)
class Hparams:
    """The tunable hyperparameters: the rows of the rules' table for ``unet3d``.

    Attributes:
        source: where the set was published.
        global_batch_size: crops of one optimizer step.
        variant: ``reference`` raises the learning rate in the warm-up epoch by epoch; ``nvidia`` with every step, from
            a counter that the untimed steps before ``run_start`` have advanced, and keeps it in the momentum buffer.
        initial_learning_rate: where the warm-up begins.
        warmup_epochs: length of the warm-up; the learning rate is constant afterwards.
        momentum: Nesterov's.
    """

    source: str
    global_batch_size: int
    optimizer: Literal["sgd"]
    variant: Literal["nvidia", "reference"]
    base_learning_rate: float
    initial_learning_rate: float
    warmup_epochs: int
    momentum: float
    weight_decay: float

    def __post_init__(self) -> None:
        require(
            "hparams",
            self,
            base_learning_rate=(0 < self.base_learning_rate < math.inf, "positive and finite"),
            initial_learning_rate=(0 <= self.initial_learning_rate < math.inf, "finite and not negative"),
            warmup_epochs=(self.warmup_epochs >= 0, "not negative"),
            momentum=(0 <= self.momentum < 1, "at least 0 and below 1"),
            weight_decay=(0 <= self.weight_decay < math.inf, "finite and not negative"),
        )


@dataclass(frozen=True)
class ModelConfig:
    """How the operations run.

    Attributes:
        instance_norm: implementation of instance norm and ReLU.
        upsample: implementation of the transposed convolutions and of joining their results with skip connections.
        convolution: implementation of the 3x3x3 convolutions; ``auto`` chooses layer by layer.
        output_convolution: implementation of the last one.
        dice_cross_entropy: implementation of the loss.
        halo: how ranks that share a volume (layout.cp) exchange planes.
        overlap: exchange them while the convolution runs.
        loss_scale: initial loss scale with fp16.
    """

    instance_norm: str
    upsample: str
    convolution: str
    output_convolution: str
    dice_cross_entropy: str
    halo: str
    overlap: bool
    loss_scale: float

    def __post_init__(self) -> None:
        require("model", self, loss_scale=(0 < self.loss_scale < math.inf, "positive and finite"))


@dataclass(frozen=True)
class SlidingWindowConfig:
    """How volumes are evaluated.

    Attributes:
        batch: windows of one forward pass.
        share: neighbouring data-parallel ranks that share the windows of each volume; null for what balances them best.
        implementation: of adding up the windows and counting the classes.
    """

    batch: int
    share: int | None
    implementation: str

    def __post_init__(self) -> None:
        require(
            "sliding_window",
            self,
            batch=(self.batch >= 1, "at least 1"),
            share=(self.share is None or self.share >= 1, "at least 1, or null"),
        )


@dataclass(frozen=True)
class UNet3DConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderSettings
    sliding_window: SlidingWindowConfig
