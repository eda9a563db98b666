"""Configuration of RetinaNet."""

from __future__ import annotations

from dataclasses import dataclass
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
from common.detection.config import BoxReaderConfig, DetectorConfig
from common.errors import ConfigError
from common.ops.anchor_matching import ANCHOR_MATCHING
from common.ops.conv_bias_relu import CONV_BIAS_RELU
from common.ops.operation import Operation
from common.ops.suppression import SUPPRESSION
from common.optim.hparams import AdamHparams

OPERATIONS: dict[str, Operation] = {
    "convolution": CONV_BIAS_RELU,
    "focal_loss": FOCAL_LOSS,
    "anchor_matching": ANCHOR_MATCHING,
    "suppression": SUPPRESSION,
}
"""Operations whose implementation ``model.implementations`` can choose."""


@dataclass(frozen=True)
class Facts(Architecture):
    """Constants of the rules, except the target: network, pictures, losses and detections. Pixel values are 0 to 255.

    Attributes:
        image_size: height and width of all pictures after resizing, px.
        mirror: probability that a training picture is flipped.
        mean, std: normalisation of each channel.
        match_low: anchors with smaller overlaps are background.
        match_high: anchors with this overlap or more are matched to the box.
        focal_alpha, focal_gamma: weight of positives and exponent of the focal loss.
        score_threshold: detections with this score or less are dropped.
        candidates: maximum number of detections per level before suppression.
        nms_threshold: overlap above which a detection suppresses a worse one of the same class.
        detections: maximum number of detections per picture.
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
    """Tunable hyperparameters: the rows for ``retinanet`` in the table of the rules.

    Attributes:
        warmup_epochs: epochs of the linear warm-up, which changes the learning rate at every iteration.
        warmup_factor: ratio of the learning rate at the first iteration to the final one.
    """

    optimizer: Literal["adam"]
    warmup_epochs: Annotated[int, NotNegative]
    warmup_factor: Annotated[float, Share]


@dataclass(frozen=True)
class ModelConfig(DetectorConfig):
    """The backbone's file has torchvision's names."""

    operations = OPERATIONS


@dataclass(frozen=True)
class RetinaNetConfig:
    """RetinaNet's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: BoxReaderConfig
