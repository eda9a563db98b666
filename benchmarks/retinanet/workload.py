"""RetinaNet as a workload: connects model, data, optimizer and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.retinanet.config import RetinaNetConfig
from benchmarks.retinanet.data import RetinaNetData, ground_truth
from benchmarks.retinanet.detect import Detector
from benchmarks.retinanet.loss import AnchorTargets, DetectionLoss
from benchmarks.retinanet.model import RetinaNet, anchors
from benchmarks.retinanet.prepared import FORMAT, is_reference_format
from benchmarks.retinanet.raw import BACKBONES
from common.config.schema import Declaration, RunConfig
from common.data.batches import Batch
from common.detection.annotations import Annotations
from common.detection.detection_workload import SquareDetection
from common.distributed.layout import Layout
from common.optim.learning_rate import warmup_then_constant
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep


class RetinaNetDetection(SquareDetection):
    """Object detection with RetinaNet."""

    config_type: ClassVar[type] = RetinaNetConfig
    title = "RetinaNet"
    backbone_file = BACKBONES[0]
    peers = "benchmarks.retinanet.peer"
    own: RetinaNetConfig
    model: RetinaNet

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        facts, implementations = self.own.facts, self.own.model.implementations
        self._anchors_A4 = anchors(facts.image_size).to(layout.device)
        self._targets = AnchorTargets(facts, self._anchors_A4, implementations)
        self._loss = DetectionLoss(
            facts.classes, facts.focal_alpha, facts.focal_gamma, implementations, layout.device, self.dtype
        )
        self.choices |= {"anchor_matching": self._targets.choice, "focal_loss": self._loss.choice}

    def network(self, generator: torch.Generator) -> RetinaNet:
        """Return the network."""
        return RetinaNet(self.own.facts, generator)

    def picture_data(self) -> RetinaNetData:
        """Return the description of the data."""
        return RetinaNetData(self.own.facts, self.own.reader, self.dtype)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return one group with all trained parameters."""
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return [ParameterGroup(trained, weight_decay=self.own.hparams.weight_decay)]

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare data format, initialised tensors, and what the closed division forbids beyond the logged values."""
        own: RetinaNetConfig = cfg.workload
        names = _initialised_tensors(own.facts.layers, own.facts.head_convolutions)
        # All readers use the same order.
        return Declaration(
            data_format=FORMAT,
            reads_unprepared=is_reference_format,
            initialised_tensors=names,
            forbidden=cls.forbidden_backbone(cfg),
        )

    def build_step(self) -> TrainStep:
        """Build the step: accumulated micro-batches, then Adam. After the warm-up, the rate is constant."""
        hparams = self.own.hparams
        steps_of_epoch = math.ceil(self.cfg.benchmark.train_samples / self.cfg.global_batch)
        schedule = warmup_then_constant(
            hparams.base_learning_rate,
            hparams.base_learning_rate * hparams.warmup_factor,
            hparams.warmup_epochs * steps_of_epoch,
            first_step=0,
        )
        return self.step_with(hparams.adam(), schedule, loss_scale=self.own.model.loss_scale)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the focal loss plus the L1 loss of the offsets, 0-d.

        Each picture's loss is divided by its number of positive anchors (at least 1); the result is the mean over
        pictures.

        ``micro_batch`` has ``image`` (N, C, H, W) and the results of
        :class:`benchmarks.retinanet.loss.AnchorTargets`.
        """
        tensors = micro_batch.tensors
        levels = self.model(tensors["image"])
        parts = self._loss(
            levels,
            self.model.logit_bias,
            tensors["class"],
            tensors["offsets"],
            tensors["weight"],
            self.loss_scale,
        )
        total = parts.classes + parts.boxes
        metrics = {"loss": total, "classification_loss": parts.classes, "box_loss": parts.boxes}
        return Losses(total, {name: value.detach() for name, value in metrics.items()})

    def box_scale(self) -> float:
        """Return the size of the resized picture, px."""
        return self.own.facts.image_size

    def targets(self, boxes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``class`` and ``offsets`` of each anchor, and ``weight`` of each picture.

        See :class:`benchmarks.retinanet.loss.AnchorTargets`.
        """
        return self._targets(boxes["boxes"], boxes["label"], boxes["count"])

    def detector(self, layout: Layout) -> Detector:
        """Return the detector of an evaluation."""
        return Detector(self.model, self.own.facts, self._anchors_A4, self.own.model.implementations)

    def ground_truth(self) -> Callable[[Path], Annotations]:
        """Return the function that reads the boxes with which detections are compared."""
        return ground_truth


def _initialised_tensors(layers: Sequence[int], head_convolutions: int) -> list[str]:
    """Names of the weights and biases of all convolutions, as the reference logs them since round v2.0.

    Args:
        layers: bottleneck blocks in each stage of the backbone.
        head_convolutions: convolutions of each head before its last one.
    """
    body = "module.backbone.body"
    names = [f"{body}.conv1.weight"]
    for stage, blocks in enumerate(layers, 1):
        names.append(f"{body}.layer{stage}.0.downsample.0.weight")
        names += [f"{body}.layer{stage}.{block}.conv{n}.weight" for block in range(blocks) for n in (1, 2, 3)]
    biased = [f"module.backbone.fpn.{kind}_blocks.{n}" for kind in ("inner", "layer") for n in range(3)]
    biased += ["module.backbone.fpn.extra_blocks.p6", "module.backbone.fpn.extra_blocks.p7"]
    for head, last in (("classification_head", "cls_logits"), ("regression_head", "bbox_reg")):
        biased.append(f"module.head.{head}.{last}")
        # The numbers are even, because the reference counts the ReLUs between the convolutions too.
        biased += [f"module.head.{head}.conv.{2 * n}" for n in range(head_convolutions)]
    return names + [f"{name}.{part}" for name in biased for part in ("weight", "bias")]
