"""Configuration of Mask R-CNN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.maskrcnn.ops.mask_targets import MASK_TARGETS
from benchmarks.maskrcnn.ops.paste import PASTE
from benchmarks.maskrcnn.ops.resize import RESIZE
from benchmarks.maskrcnn.ops.roi_align import ROI_ALIGN
from benchmarks.maskrcnn.ops.selected_logits import SELECTED_LOGITS
from benchmarks.maskrcnn.polygon_table import PolygonCapacity
from common.config.ranges import (
    AtLeast,
    Each,
    NotNegative,
    Positive,
    Probability,
    Share,
    ShareAboveZero,
    ShareBelowOne,
)
from common.detection.config import BoxReaderConfig, DetectorConfig
from common.errors import ConfigError
from common.ops.anchor_matching import ANCHOR_MATCHING
from common.ops.conv_bias_relu import CONV_BIAS_RELU
from common.ops.operation import Operation
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
"""Operations whose implementation ``model.implementations`` can choose."""


@dataclass(frozen=True)
class Architecture:
    """Shape of the network.

    Attributes:
        classes: number of object classes, without background.
        layers: blocks in the four stages of the trunk.
        width: channels of the trunk's first convolution.
        trained_stages: number of trained stages, counted from the last. Earlier stages and all batch norms are frozen.
        pyramid_channels: channels of the pyramid's levels, of the region proposal network and of the mask head.
        anchor_sizes: square root of the anchors' area in px, per level from the finest.
        anchor_ratios: ratios of height to width.
        box_channels: channels of both hidden layers of the box head.
        box_resolution, mask_resolution: height and width of the RoIAlign features of each head.
        mask_convolutions: 3x3 convolutions of the mask head.
        roi_samples: samples of a RoIAlign bin along each side.
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
    """Constants of the rules, except the targets: network, pictures, losses and detections.

    Pixel values are 0 to 255, in the order blue, green, red.

    Attributes:
        min_size: shorter side of a picture after resizing, px; less if the longer side would exceed ``max_size``.
        max_size: maximum length of the longer side after resizing, px.
        longest_side: longest side of a published picture, px.
        mirror: probability that a training picture is flipped.
        mean: mean of each channel.
        rpn_low: anchors with smaller overlaps are background.
        rpn_high: anchors with this overlap or more are matched to the box.
        rpn_samples: anchors per picture in the losses.
        rpn_positive: maximum fraction of them with a box.
        rpn_beta: distance at which the smooth L1 loss of proposal offsets becomes linear.
        rpn_nms_threshold: overlap above which a proposal suppresses a worse one of the same level.
        train_candidates, eval_candidates: maximum number of proposals per level before and after suppression.
        eval_proposals: proposals per picture in evaluation.
        roi_low: proposals with smaller overlaps are background; all others are matched to the box.
        roi_sampled: proposals per picture in training.
        roi_positive: maximum fraction of them with a box.
        box_weights: weights of x, y, width and height in the offsets of the box head.
        box_beta: distance at which the smooth L1 loss of box offsets becomes linear.
        score_threshold: detections with this score or less are dropped.
        nms_threshold: overlap above which a detection suppresses a worse one of the same class.
        detections: maximum number of detections per picture.
        mask_threshold: probability above which a pixel belongs to an object.
        decay_factor: factor of the learning rate at each of ``hparams.decay_steps``.
        bias_rate: ratio of the learning rate of biases to that of weights.
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
        """Height and width of the mask head's output."""
        return 2 * self.mask_resolution

    @property
    def mask_slots(self) -> int:
        """Maximum number of proposals per picture with a mask, which are those with a box."""
        return int(self.roi_sampled * self.roi_positive)


@dataclass(frozen=True)
class Hparams(SgdHparams):
    """Tunable hyperparameters: the rows for ``maskrcnn`` in the table of the rules.

    Attributes:
        warmup_steps: optimizer steps of the warm-up.
        warmup_factor: amount by which the rate is lower for each remaining warm-up step, also for biases.
        decay_steps: optimizer steps after which the rate falls.
        image_candidates: number of best proposals over all levels that training uses.
        candidates_from: whether ``image_candidates`` is per ``picture`` or for the whole ``micro_batch``.
    """

    optimizer: Literal["sgd_with_momentum"]
    warmup_steps: Annotated[int, NotNegative]
    warmup_factor: Annotated[float, NotNegative]
    decay_steps: tuple[int, int]
    image_candidates: Annotated[int, AtLeast(1)]
    candidates_from: Literal["micro_batch", "picture"]


@dataclass(frozen=True)
class ModelConfig(DetectorConfig):
    """The backbone's file has Caffe2's names."""

    operations = OPERATIONS


@dataclass(frozen=True, kw_only=True)
class MaskReaderConfig(BoxReaderConfig):
    """Options for reading pictures with masks.

    Attributes:
        shapes: padded heights and widths of batches, px, each with its own CUDA graph. A batch gets the smallest shape
            that fits all its pictures.
    """

    shapes: tuple[tuple[int, int], ...] = ()
    polygon_capacity: PolygonCapacity = field(default_factory=lambda: PolygonCapacity(1, 1, 1))


@dataclass(frozen=True)
class MaskRCNNConfig:
    """Mask R-CNN's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: MaskReaderConfig
