"""RetinaNet as a workload: connects model, data, optimizer and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.retinanet.anchors import anchors
from benchmarks.retinanet.config import RetinaNetConfig
from benchmarks.retinanet.data import ground_truth, open_eval, open_train, warm_up
from benchmarks.retinanet.data_settings import DataSettings
from benchmarks.retinanet.detect import Detector
from benchmarks.retinanet.loss import DetectionLoss
from benchmarks.retinanet.model import RetinaNet
from benchmarks.retinanet.prepared import FORMAT, is_the_references
from benchmarks.retinanet.raw import BACKBONES
from benchmarks.retinanet.targets import AnchorTargets
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource, EvalSource, HostBatch
from common.detection.coco_scorer import CocoScorer
from common.detection.evaluation import DetectionEvaluation, of_pictures
from common.distributed.layout import Layout
from common.nn.backbone_file import load_backbone
from common.nn.frozen import frozen_digest
from common.optim.learning_rate import warmup_then_constant
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep

EXAMPLE_BOXES = 7
"""Boxes per example picture, which is the average of OpenImages."""


class RetinaNetDetection(Workload):
    """Object detection with RetinaNet."""

    config_type: ClassVar[type] = RetinaNetConfig
    title = "RetinaNet"
    peers = "benchmarks.retinanet.peer"
    own: RetinaNetConfig
    model: RetinaNet

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own, facts = self.own, self.own.facts
        self.model = RetinaNet(facts, layout.shared_generator("weights"))
        if cfg.assets_dir is not None:
            load_backbone(cfg.assets_dir / own.model.backbone, self.model.backbone.body)
        self.model = self.model.cast(self.dtype).to(layout.device)
        implementations = own.model.implementations
        self.choices |= self.model.choose_implementations(implementations)
        self._anchors_A4 = anchors(facts.image_size).to(layout.device)
        self._targets = AnchorTargets(facts, self._anchors_A4, implementations)
        self._loss = DetectionLoss(
            facts.classes, facts.focal_alpha, facts.focal_gamma, implementations, layout.device, self.dtype
        )
        self.choices |= {"anchor_matching": self._targets.choice, "focal_loss": self._loss.choice}
        self._base_digest = frozen_digest(self.model)

    def base_digest(self) -> str | None:
        """Return the digest of the frozen tensors, which checkpoints store instead of them."""
        return self._base_digest

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return one group with all trained parameters."""
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return [ParameterGroup(trained, weight_decay=self.own.hparams.weight_decay)]

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare what the closed division forbids and the log does not show."""
        own: RetinaNetConfig = cfg.workload
        broken = []
        if own.model.backbone != BACKBONES[0]:
            broken.append(f"model.backbone={own.model.backbone}: training starts from torchvision's {BACKBONES[0]}")
        if cfg.assets_dir is None:
            broken.append(f"assets_dir=null: training starts from torchvision's {BACKBONES[0]}, in assets_dir")
        names = _initialised_tensors(own.facts.layers, own.facts.head_convolutions)
        # All readers use the same order.
        return Declaration(
            data_format=FORMAT, reads_unprepared=is_the_references, initialised_tensors=names, forbidden=broken
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
        """Return focal loss plus L1 loss of the offsets, as a mean over the micro-batch.

        ``micro_batch`` has ``image`` (N, C, H, W) and the results of
        :class:`benchmarks.retinanet.targets.AnchorTargets`.
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

    def example_batches(self) -> Iterable[Batch]:
        """Yield one random micro-batch with a few boxes, which has the shapes of every training micro-batch."""
        generator, facts, count = self.layout.generator("example"), self.own.facts, self.cfg.micro_batch
        room = self.own.reader.max_boxes  # capacity of the reader's batches; kernels are compiled for it
        corners = torch.rand((count, room, 2, 2), generator=generator).sort(2).values * facts.image_size
        boxes = {
            "boxes": corners.flatten(2),
            "label": torch.randint(facts.classes, (count, room), generator=generator),
            "count": torch.full((count,), min(EXAMPLE_BOXES, room)),
        }
        targets = self._targets(**self._as_targets_take_them(self.to_device(boxes)))
        yield Batch({"image": self._example_images(count, generator), **targets}, self.nominal_samples)

    def _example_images(self, count: int, generator: torch.Generator) -> Tensor:
        size = self.own.facts.image_size
        image_NCHW = torch.randn((count, 3, size, size), generator=generator)
        return image_NCHW.to(self.layout.device, self.dtype, memory_format=torch.channels_last)

    @staticmethod
    def _as_targets_take_them(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"boxes_BM4": tensors["boxes"], "label_BM": tensors["label"], "count_B": tensors["count"]}

    def prepare(self, batch: HostBatch) -> Batch:
        """Copy pictures and boxes to the device and match the boxes there."""
        tensors = self.to_device(batch.tensors)
        targets = self._targets(**self._as_targets_take_them(tensors))
        return Batch({"image": tensors["image"], **targets}, batch.samples, batch.key)

    def _data_settings(self) -> DataSettings:
        return DataSettings(self.own.facts, self.own.reader, self.dtype)

    def warm_up_reader(self) -> None:
        """Load DALI and run each of its operators once, if DALI is the reader."""
        warm_up(self._data_settings(), self.layout, self.cfg.micro_batch)

    def open_data(self, root: Path) -> DataSource:
        """Open the training pictures."""
        return open_train(
            root, self._data_settings(), self.layout, self.cfg.micro_batch, self.cfg.grad_accumulation_steps
        )

    def evaluation(self, layout: Layout) -> DetectionEvaluation:
        """Return the evaluation, COCO's mean average precision, on the ranks of ``layout``."""
        own, settings, batch = self.own, self._data_settings(), self.own.reader.eval_batch

        def open_source(root: Path) -> EvalSource:
            return open_eval(root, settings, layout, batch)

        detect = Detector(self.model, own.facts, self._anchors_A4, own.model.implementations)
        self.choices["suppression"] = detect.choice
        on_device = self.cfg.evaluation.scoring == "inline"
        scorer = CocoScorer(ground_truth, layout.device if on_device else torch.device("cpu"))
        return DetectionEvaluation(
            self.model,
            {(): of_pictures(detect, self._example_images(batch, layout.generator("example")))},
            open_source,
            own.facts.detections,
            layout,
            self.cfg.cuda_graphs,
            scorer,
        )

    def synthetic_evaluation(self, layout: Layout) -> DetectionEvaluation:
        """Return an evaluation of random pictures."""
        return self.evaluation(layout).with_noise(self.cfg.benchmark.eval_samples)

    def sample_flops(self) -> float:
        """Return the FLOPs to train on one picture."""
        return self.model.sample_flops(self.own.facts.image_size)


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
