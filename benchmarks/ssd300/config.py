"""Configuration of SSD300."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.config.ranges import (
    AtLeast,
    Each,
    NotNegative,
    Positive,
    Probability,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
)
from common.detection.config import BoxReaderConfig, DetectorConfig
from common.errors import ConfigError
from common.ops.anchor_matching import ANCHOR_MATCHING
from common.ops.batch_norm import BATCH_NORM
from common.ops.conv_bias_relu import CONV_BIAS_RELU
from common.ops.convolution import CONVOLUTION
from common.ops.operation import AUTO, REFERENCE, Operation
from common.ops.suppression import SUPPRESSION
from common.optim.hparams import SgdHparams

OPERATIONS: dict[str, Operation] = {
    "batch_norm": BATCH_NORM,
    "convolution_moments": CONVOLUTION,  # convolutions before a batch norm
    "convolution": CONV_BIAS_RELU,  # convolutions with a bias
    "anchor_matching": ANCHOR_MATCHING,
    "suppression": SUPPRESSION,
}
"""Operations whose implementation ``model.implementations`` can choose."""

BACKBONES = ("resnet34-333f7ec4.pth", "backbone.pth")
"""File names of the backbone's initial weights: torchvision's, and that of synthetic data."""
Interval = Range("two positive numbers, ascending", lambda pair: 0 < pair[0] <= pair[1])
Shares = Range("two shares above 0, ascending", lambda pair: 0 < pair[0] <= pair[1] <= 1)
Extra = Range(
    "three positive numbers, the last of them a stride of 1 or 2",
    lambda extra: min(extra) > 0 and extra[2] in (1, 2),
)
Ascending = Range("two positive epochs, ascending", lambda epochs: 0 < epochs[0] < epochs[1])


@dataclass(frozen=True)
class Facts:
    """Constants of the rules, except the target. Pixel values are 0 to 255.

    Attributes:
        classes: number of classes, without background.
        image_size: height and width of all pictures after resizing, px.
        width: channels of the backbone's first convolution.
        layers: basic blocks in the three stages of the backbone.
        extras: per extra block: channels of the 1x1 convolution, channels of the 3x3 convolution, and stride of the
            latter. With stride 1, it has no padding.
        steps: distance between default boxes of a level, px.
        box_sizes: size of the smallest default box of each level, px, and one more for a level that would follow.
        aspect_ratios: aspect ratios of each level; the inverse of a ratio is used too.
        deviations: divisors of the offsets of centres and of sizes.
        match_overlap: overlap above which a default box is matched to a box.
        negatives: number of background boxes in the loss, per matched default box.
        crop_overlaps: minimum overlaps of crops, one kind each. A crop without minimum and no crop are two more kinds;
            all are equally likely.
        crop_scale: range of a crop's width and height, as fractions of the picture's.
        crop_aspect: range of the ratio of these fractions, width over height.
        mirror: probability that a training picture is flipped.
        brightness, contrast, saturation: maximum difference of the factor from 1.
        hue: maximum shift, as a fraction of the colour circle.
        mean, std: normalisation of each channel.
        bn_epsilon, bn_momentum: parameters of the batch norms.
        decay_factor: factor of the learning rate at every boundary.
        score_threshold: detections with this score or less are dropped.
        candidates: maximum number of detections per class before suppression.
        nms_threshold: overlap from which a detection suppresses a worse one of the same class.
        detections: maximum number of detections per picture.
    """

    classes: Annotated[int, AtLeast(1)]
    image_size: Annotated[int, AtLeast(16, "at least 16 px")]
    width: Annotated[int, AtLeast(1, "at least 1 channel")]
    layers: Annotated[tuple[int, int, int], Each(AtLeast(1))]
    extras: Annotated[tuple[tuple[int, int, int], ...], Each(Extra)]
    steps: Annotated[tuple[float, ...], Each(Positive)]
    box_sizes: Annotated[tuple[float, ...], Each(Positive)]
    aspect_ratios: tuple[Annotated[tuple[float, ...], Each(Positive)], ...]
    deviations: Annotated[tuple[float, float], Each(Positive)]
    match_overlap: Annotated[float, Share]
    negatives: Annotated[int, AtLeast(1)]
    crop_overlaps: Annotated[tuple[float, ...], Each(ShareBelowOne)]
    crop_scale: Annotated[tuple[float, float], Shares]
    crop_aspect: Annotated[tuple[float, float], Interval]
    mirror: Annotated[float, Probability]
    brightness: Annotated[float, Share]
    contrast: Annotated[float, Share]
    saturation: Annotated[float, Share]
    hue: Annotated[float, Range("a share of at most a half", lambda hue: 0 <= hue <= 0.5)]
    mean: tuple[float, float, float]
    std: Annotated[tuple[float, float, float], Each(Positive)]
    bn_epsilon: Annotated[float, Positive]
    bn_momentum: Annotated[float, ShareAboveZero]
    decay_factor: Annotated[float, ShareAboveZero]
    score_threshold: Annotated[float, ShareBelowOne]
    candidates: Annotated[int, AtLeast(1)]
    nms_threshold: Annotated[float, ShareAboveZero]
    detections: Annotated[int, AtLeast(1)]

    def __post_init__(self) -> None:
        levels = len(self.extras) + 1
        for name, wanted in (("steps", levels), ("aspect_ratios", levels), ("box_sizes", levels + 1)):
            if (found := len(getattr(self, name))) != wanted:
                raise ConfigError(f"{name}: {found} entries, where {levels - 1} extras make {levels} levels: {wanted}")
        if min(self.level_sizes) < 1:
            raise ConfigError(
                f"image_size={self.image_size}: too small for the extras, whose levels have sides {self.level_sizes}"
            )

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Height and width of each level: an eighth of the picture, then reduced by each extra block."""
        size = self.image_size
        for _ in range(3):  # first convolution, pooling and second stage
            size = (size - 1) // 2 + 1
        sizes = [size]
        for *_, stride in self.extras:
            sizes.append(sizes[-1] - 2 if stride == 1 else (sizes[-1] - 1) // 2 + 1)
        return tuple(sizes)

    @property
    def boxes_per_cell(self) -> tuple[int, ...]:
        """Default boxes per cell of each level: two squares, and two for each aspect ratio."""
        return tuple(2 + 2 * len(ratios) for ratios in self.aspect_ratios)


@dataclass(frozen=True)
class Hparams(SgdHparams):
    """Tunable hyperparameters: the rows for ``ssd`` in the table of the rules.

    Attributes:
        variant: ``reference`` counts warm-up iterations from 0 and keeps the rate of the last one until the first
            boundary. ``nvidia`` counts from 1, has the full rate after the warm-up, and keeps the learning rate in the
            momentum buffer.
        base_learning_rate: rate before the first boundary, already scaled to the global batch.
        warmup_epochs: length of the warm-up; its iterations are rounded down.
        warmup_factor: f; the warm-up begins at 1 - 2**-f times the learning rate.
        decay_epochs: epochs after which the learning rate falls.
        crop_attempts: attempts per kind of crop before another kind is drawn.
        bn_group: number of ranks that share batch-norm statistics.
    """

    optimizer: Literal["sgd"]
    variant: Literal["nvidia", "reference"]
    warmup_epochs: Annotated[float, NotNegative]
    warmup_factor: Annotated[int, NotNegative]
    decay_epochs: Annotated[tuple[int, int], Ascending]
    crop_attempts: Literal[1, 50]
    bn_group: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class ModelConfig(DetectorConfig):
    """The backbone's file has torchvision's names."""

    operations = OPERATIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.implementations["convolution_moments"] != AUTO and self.implementations["batch_norm"] == REFERENCE:
            raise ConfigError(
                "implementations.batch_norm=reference: only Triton's batch norm reads the moments of "
                f"implementations.convolution_moments={self.implementations['convolution_moments']}"
            )


@dataclass(frozen=True)
class Ssd300Config:
    """SSD300's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: BoxReaderConfig
