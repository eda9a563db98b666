"""SSD300's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
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
from common.detection.reader_config import ReaderConfig
from common.errors import ConfigError
from common.ops.anchor_matching import ANCHOR_MATCHING
from common.ops.batch_norm import BATCH_NORM
from common.ops.conv_bias_relu import CONV_BIAS_RELU
from common.ops.convolution import CONVOLUTION
from common.ops.operation import AUTO, REFERENCE, Operation, all_implementations
from common.ops.suppression import SUPPRESSION
from common.optim.hparams import SgdHparams

OPERATIONS: dict[str, Operation] = {
    "batch_norm": BATCH_NORM,
    "convolution_moments": CONVOLUTION,  # convolutions in front of a batch norm
    "convolution": CONV_BIAS_RELU,  # convolutions with a bias
    "anchor_matching": ANCHOR_MATCHING,
    "suppression": SUPPRESSION,
}
"""Operations that ``model.implementations`` can choose an implementation of."""

BACKBONES = ("resnet34-333f7ec4.pth", "backbone.pth")
"""Names of the file that the backbone starts from: torchvision's, and that of synthetic data."""
Interval = Range("two positive numbers, ascending", lambda pair: 0 < pair[0] <= pair[1])
Shares = Range("two shares above 0, ascending", lambda pair: 0 < pair[0] <= pair[1] <= 1)
Extra = Range(
    "three positive numbers, the last of them a stride of 1 or 2",
    lambda extra: min(extra) > 0 and extra[2] in (1, 2),
)
Ascending = Range("two positive epochs, ascending", lambda epochs: 0 < epochs[0] < epochs[1])


@dataclass(frozen=True)
class Facts:
    """What the rules fix beside the target. Pixel values count from 0 to 255.

    Attributes:
        classes: K, without background.
        image_size: height and width that every picture is resized to, px.
        width: channels of the backbone's first convolution.
        layers: basic blocks of its three stages.
        extras: of each block behind the backbone the channels of its 1x1 and of its 3x3 convolution, and the stride of
            the latter; with stride 1 it is not padded.
        steps: px between two default boxes of a level.
        box_sizes: px, of the smallest default box of each level; one more than there are levels.
        aspect_ratios: of each level; a ratio also counts as its inverse.
        deviations: what the offsets of centres and of sizes are divided by.
        match_overlap: overlap above which a default box has a box.
        negatives: background that counts, per default box that has a box.
        crop_overlaps: of the crops with a smallest overlap; a crop without, and no crop, are as likely as each.
        crop_scale: width and height of a crop as shares of the picture's.
        crop_aspect: width over height of these shares.
        mirror: probability that a training picture is flipped.
        brightness, contrast, saturation: largest change of the factor 1.
        hue: largest change, as a share of the circle of hues.
        mean, std: of each channel.
        bn_epsilon, bn_momentum: of the batch norms.
        decay_factor: of the learning rate, at every boundary.
        score_threshold: detections at or below it are dropped.
        candidates: detections of a class that go into suppression.
        nms_threshold: overlap from which on the better of two detections of a class suppresses the other.
        detections: best ones of a picture that are kept.
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
        """Height and width of each level: an eighth of the picture, then what each extra block leaves of it."""
        size = self.image_size
        for _ in range(3):  # first convolution, pooling and second stage
            size = (size - 1) // 2 + 1
        sizes = [size]
        for *_, stride in self.extras:
            sizes.append(sizes[-1] - 2 if stride == 1 else (sizes[-1] - 1) // 2 + 1)
        return tuple(sizes)

    @property
    def boxes_per_cell(self) -> tuple[int, ...]:
        """Default boxes in each cell of each level: two squares, and two of each aspect ratio."""
        return tuple(2 + 2 * len(ratios) for ratios in self.aspect_ratios)


@dataclass(frozen=True)
class Hparams(SgdHparams):
    """The tunable hyperparameters: the rows of the rules' table for ``ssd``.

    Attributes:
        variant: ``reference`` counts the iterations of the warm-up from 0 and stays at the rate of the last of them
            until the first boundary; ``nvidia`` counts from 1, has the full rate after the warm-up, and keeps the
            learning rate in the momentum buffer.
        base_learning_rate: before the first boundary; already scaled to the global batch.
        warmup_epochs: length of the warm-up; its iterations are rounded down.
        warmup_factor: f; the warm-up begins 2**-f below the learning rate.
        decay_epochs: after so many epochs the learning rate falls.
        crop_attempts: crops that are tried before another kind of crop is drawn.
        bn_group: ranks that share batch-norm statistics.
    """

    optimizer: Literal["sgd"]
    variant: Literal["nvidia", "reference"]
    warmup_epochs: Annotated[float, NotNegative]
    warmup_factor: Annotated[int, NotNegative]
    decay_epochs: Annotated[tuple[int, int], Ascending]
    crop_attempts: Literal[1, 50]
    bn_group: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class ModelConfig:
    """How the network starts and how its operations run.

    Attributes:
        backbone: file in ``assets_dir`` with the weights that the backbone starts from, under torchvision's names.
            Without ``assets_dir`` they are drawn.
        loss_scale: the first scale of the loss in fp16.
        implementations: name of an operation to the implementation to use; ``auto`` for those left out.
    """

    backbone: str
    loss_scale: Annotated[float, Positive]
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))
        if self.implementations["convolution_moments"] != AUTO and self.implementations["batch_norm"] == REFERENCE:
            raise ConfigError(
                "implementations.batch_norm=reference: only Triton's batch norm reads the moments of "
                f"implementations.convolution_moments={self.implementations['convolution_moments']}"
            )


@dataclass(frozen=True)
class Ssd300Config:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
