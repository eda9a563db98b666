"""RetinaNet's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.retinanet.model import Architecture
from benchmarks.retinanet.ops.focal_loss import FOCAL_LOSS
from common.config.ranges import (
    AtLeast,
    Each,
    NotNegative,
    Positive,
    Probability,
    Share,
    ShareBelowOne,
)
from common.detection.reader_config import ReaderConfig
from common.errors import ConfigError
from common.ops.anchor_matching import ANCHOR_MATCHING
from common.ops.conv_bias_relu import CONV_BIAS_RELU
from common.ops.operation import Operation, all_implementations
from common.ops.suppression import SUPPRESSION
from common.optim.hparams import AdamHparams

OPERATIONS: dict[str, Operation] = {
    "convolution": CONV_BIAS_RELU,
    "focal_loss": FOCAL_LOSS,
    "anchor_matching": ANCHOR_MATCHING,
    "suppression": SUPPRESSION,
}
"""Operations that ``model.implementations`` can choose an implementation of."""


@dataclass(frozen=True)
class Facts(Architecture):
    """What the rules fix beside the target: the network, which takes them as they are, pictures, losses and detections.

    Pixel values count from 0 to 255.

    Attributes:
        image_size: height and width that every picture is resized to, px.
        mirror: probability that a training picture is flipped.
        mean, std: of each channel.
        match_low, match_high: overlaps below which an anchor is background, and from which it has the box.
        focal_alpha, focal_gamma: weight of the positive term, and the exponent, of the focal loss.
        score_threshold: detections at or below it are dropped.
        candidates: detections of a level that go into suppression.
        nms_threshold: overlap above which the better of two detections of a class suppresses the other.
        detections: best ones of a picture that are kept.
    """

    image_size: Annotated[int, AtLeast(32, "at least 32 px")]
    mirror: Annotated[float, Probability]
    mean: tuple[float, float, float]
    std: Annotated[tuple[float, float, float], Each(Positive)]
    match_low: Annotated[float, Share]
    match_high: Annotated[float, Share]
    focal_alpha: Annotated[float, Share]
    focal_gamma: Annotated[float, NotNegative]
    score_threshold: Annotated[float, ShareBelowOne]
    candidates: Annotated[int, AtLeast(1)]
    nms_threshold: Annotated[float, Share]
    detections: Annotated[int, AtLeast(1)]

    def __post_init__(self) -> None:
        if self.match_low > self.match_high:
            raise ConfigError(f"match_low={self.match_low}: at most match_high={self.match_high}")


@dataclass(frozen=True)
class Hparams(AdamHparams):
    """The tunable hyperparameters: the rows of the rules' table for ``retinanet``.

    Attributes:
        warmup_epochs: epochs in which the rate rises linearly, iteration by iteration.
        warmup_factor: of the rate at the first of these iterations.
    """

    optimizer: Literal["adam"]
    warmup_epochs: Annotated[int, NotNegative]
    warmup_factor: Annotated[float, Share]


@dataclass(frozen=True)
class ModelConfig:
    """What the backbone starts from, and how operations run.

    Attributes:
        backbone: file in ``assets_dir`` with the weights that the backbone starts from, under torchvision's names.
            Without ``assets_dir`` they are drawn.
        loss_scale: initial loss scale with fp16.
        implementations: name of an operation to the implementation to use; ``auto`` for those left out.
    """

    backbone: str
    loss_scale: Annotated[float, Positive]
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))


@dataclass(frozen=True)
class RetinaNetConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
