"""Mask R-CNN's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.maskrcnn.ops.mask_targets import MASK_TARGETS
from benchmarks.maskrcnn.ops.paste import PASTE
from benchmarks.maskrcnn.ops.resize import RESIZE
from benchmarks.maskrcnn.ops.roi_align import ROI_ALIGN
from benchmarks.maskrcnn.ops.selected_logits import SELECTED_LOGITS
from benchmarks.maskrcnn.polygon_table import PolygonRoom
from common.config.ranges import (
    AtLeast,
    Each,
    FiniteNotNegative,
    NotNegative,
    Positive,
    Probability,
    Share,
    ShareAboveZero,
    ShareBelowOne,
)
from common.detection.reader_config import ReaderConfig
from common.errors import ConfigError
from common.ops.anchor_matching import ANCHOR_MATCHING
from common.ops.conv_bias_relu import CONV_BIAS_RELU
from common.ops.operation import Operation, all_implementations
from common.ops.suppression import SUPPRESSION
from common.optim.hparams import SgdHparams

OPERATIONS: dict[str, Operation] = {
    "convolution": CONV_BIAS_RELU,
    "anchor_matching": ANCHOR_MATCHING,
    "suppression": SUPPRESSION,
    "roi_align": ROI_ALIGN,
    "mask_targets": MASK_TARGETS,
    "selected_logits": SELECTED_LOGITS,
    "resize": RESIZE,
    "paste": PASTE,
}
"""Operations that ``model.implementations`` can choose an implementation of."""


@dataclass(frozen=True)
class Architecture:
    """The shape of the network.

    Attributes:
        classes: of objects, beside background.
        layers: blocks of the trunk's four stages.
        width: channels of its first convolution.
        trained_stages: last stages that are trained; what comes before them is frozen, as are all batch norms.
        pyramid_channels: channels of the pyramid's levels, of the region proposal network and of the mask head.
        anchor_sizes: square roots of the areas of each level's anchors, px, from the finest level.
        anchor_ratios: heights over widths.
        box_channels: of both hidden layers of the box head.
        box_resolution, mask_resolution: height and width of what RoIAlign gives the heads.
        mask_convolutions: 3x3 convolutions of the mask head.
        roi_samples: samples of a bin of RoIAlign along each side.
    """

    classes: Annotated[int, AtLeast(1)]
    layers: tuple[int, int, int, int]
    width: Annotated[int, AtLeast(1)]
    trained_stages: Annotated[int, NotNegative]
    pyramid_channels: Annotated[int, AtLeast(1)]
    anchor_sizes: tuple[int, int, int, int, int]
    anchor_ratios: tuple[float, ...]
    box_channels: Annotated[int, AtLeast(1)]
    box_resolution: Annotated[int, AtLeast(1)]
    mask_resolution: Annotated[int, AtLeast(1)]
    mask_convolutions: Annotated[int, NotNegative]
    roi_samples: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class Facts(Architecture):
    """What the rules fix beside the targets: the network, which takes them as they are, pictures, losses, detections.

    Pixel values count from 0 to 255, in the order blue, green, red.

    Attributes:
        min_size, max_size: a picture is resized so that its shorter side is ``min_size`` px, or less where its longer
            one would exceed ``max_size`` px.
        longest_side: of a picture as it is published, px.
        mirror: probability that a training picture is flipped.
        mean: of each channel.
        rpn_low, rpn_high: overlaps below which an anchor is background, and from which it has the box.
        rpn_samples, rpn_positive: anchors of a picture that the losses see, and the largest share of them with a box.
        rpn_beta: where the smooth L1 loss of the proposals' offsets becomes linear.
        rpn_nms_threshold: overlap above which the better of two proposals of a level suppresses the other.
        train_candidates, eval_candidates: proposals of a level that go into suppression, and that it keeps at most.
        eval_proposals: proposals of a picture that the heads see in evaluation.
        roi_low: overlap below which a proposal is background; from there on it has the box.
        roi_sampled, roi_positive: proposals of a picture that the heads see in training, and the largest share of them
            with a box.
        box_weights: of x, y, width and height in the box head's offsets.
        box_beta: where the smooth L1 loss of the boxes' offsets becomes linear.
        score_threshold: detections at or below it are dropped.
        nms_threshold: overlap above which the better of two detections of a class suppresses the other.
        detections: best ones of a picture that are kept.
        mask_threshold: probability above which a pixel belongs to an object.
        decay_factor: of the learning rate at each of ``hparams.decay_steps``.
        bias_rate: learning rate of biases over that of weights.
    """

    min_size: Annotated[int, AtLeast(1)]
    max_size: Annotated[int, AtLeast(1)]
    longest_side: Annotated[int, AtLeast(1)]
    mirror: Annotated[float, Probability]
    mean: tuple[float, float, float]
    rpn_low: Annotated[float, Share]
    rpn_high: Annotated[float, Share]
    rpn_samples: Annotated[int, AtLeast(1)]
    rpn_positive: Annotated[float, Share]
    rpn_beta: Annotated[float, Positive]
    rpn_nms_threshold: Annotated[float, Share]
    train_candidates: Annotated[int, AtLeast(1)]
    eval_candidates: Annotated[int, AtLeast(1)]
    eval_proposals: Annotated[int, AtLeast(1)]
    roi_low: Annotated[float, Share]
    roi_sampled: Annotated[int, AtLeast(1)]
    roi_positive: Annotated[float, Share]
    box_weights: Annotated[tuple[float, float, float, float], Each(Positive)]
    box_beta: Annotated[float, Positive]
    score_threshold: Annotated[float, ShareBelowOne]
    nms_threshold: Annotated[float, Share]
    detections: Annotated[int, AtLeast(1)]
    mask_threshold: Annotated[float, Share]
    decay_factor: Annotated[float, ShareAboveZero]
    bias_rate: Annotated[float, Positive]

    def __post_init__(self) -> None:
        if self.rpn_low > self.rpn_high:
            raise ConfigError(f"rpn_low={self.rpn_low}: at most rpn_high={self.rpn_high}")
        if self.min_size > self.max_size:
            raise ConfigError(f"min_size={self.min_size}: at most max_size={self.max_size}")

    @property
    def mask_size(self) -> int:
        """Height and width of the mask head's result."""
        return 2 * self.mask_resolution

    @property
    def mask_slots(self) -> int:
        """Proposals of a picture that can have a mask: those with a box."""
        return int(self.roi_sampled * self.roi_positive)


@dataclass(frozen=True)
class Hparams(SgdHparams):
    """The tunable hyperparameters: the rows of the rules' table for ``maskrcnn``.

    Attributes:
        warmup_steps: optimizer steps of the warm-up.
        warmup_factor: what the rate lacks for each step that is left of it; biases lack the same.
        decay_steps: optimizer steps after which the rate falls.
        image_candidates: best proposals over all levels that training goes on with.
        candidates_from: whether so many of each ``picture`` or of the whole ``micro_batch``.
    """

    optimizer: Literal["sgd_with_momentum"]
    warmup_steps: Annotated[int, NotNegative]
    warmup_factor: Annotated[float, FiniteNotNegative]
    decay_steps: tuple[int, int]
    image_candidates: Annotated[int, AtLeast(1)]
    candidates_from: Literal["micro_batch", "picture"]


@dataclass(frozen=True)
class ModelConfig:
    """What the backbone starts from, and how operations run.

    Attributes:
        backbone: file in ``assets_dir`` with the weights that the backbone starts from, under Caffe2's names. Without
            ``assets_dir`` they are drawn.
        loss_scale: initial loss scale with fp16.
        implementations: name of an operation to the implementation to use; ``auto`` for those left out.
    """

    backbone: str
    loss_scale: Annotated[float, Positive]
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))


@dataclass(frozen=True)
class MaskReaderConfig(ReaderConfig):
    """How pictures with masks are read.

    Attributes:
        shapes: heights and widths, px, that a batch is padded to; each is a graph of its own. A batch takes the
            smallest that all its pictures fit.
        polygon_room: of the table of polygons.
    """

    shapes: tuple[tuple[int, int], ...] = ()
    polygon_room: PolygonRoom = field(default_factory=lambda: PolygonRoom(1, 1, 1))


@dataclass(frozen=True)
class MaskRCNNConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: MaskReaderConfig
