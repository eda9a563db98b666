"""SSD300 as a workload: connects model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.ssd300.annotated import FORMAT
from benchmarks.ssd300.config import BACKBONES, Ssd300Config
from benchmarks.ssd300.data import category_ids, ground_truth, open_eval, open_train, warm_up
from benchmarks.ssd300.data_settings import DataSettings
from benchmarks.ssd300.detect import Detector
from benchmarks.ssd300.loss import multibox_loss
from benchmarks.ssd300.model import SSD300
from benchmarks.ssd300.schedule import decay_steps, warmup_steps, warmup_then_falls
from benchmarks.ssd300.targets import Targets
from benchmarks.ssd300.weight_names import initialised_tensors
from common.config.schema import Declaration, RunConfig
from common.contract.evaluation import Weights
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource, EvalSource, HostBatch
from common.detection.coco_scorer import CocoScorer
from common.detection.evaluation import DetectionEvaluation, of_pictures
from common.distributed.layout import Layout
from common.nn.backbone_file import load_backbone
from common.nn.batch_norm import set_group
from common.nn.resnet import PADDED_CHANNELS
from common.nn.running_statistics import averaged_statistics
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep

EXAMPLE_BOXES = 7
"""Boxes per example picture, which is the average of COCO."""


class Ssd300Detection(Workload):
    """Object detection with SSD300."""

    config_type: ClassVar[type] = Ssd300Config
    title = "SSD300"
    own: Ssd300Config
    model: SSD300

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        facts, model = self.own.facts, self.own.model
        self.model = SSD300(facts, layout.shared_generator("weights"))
        if cfg.assets_dir is not None:
            load_backbone(cfg.assets_dir / model.backbone, self.model.backbone)
        self.model = self.model.cast(self.dtype).to(layout.device)
        self.choices |= self.model.choose_implementations(model.implementations)
        set_group(self.model, layout.subgroup("dp", self.own.hparams.bn_group))
        self._targets = Targets(facts, model.implementations, layout.device)
        self.choices["anchor_matching"] = self._targets.choice

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return one group with all parameters: batch norms and biases decay too.

        Only NVIDIA's submissions keep the learning rate in the momentum buffer.
        """
        hparams = self.own.hparams
        named = dict(self.model.named_parameters())
        inside = hparams.variant == "nvidia"
        return [ParameterGroup(named, weight_decay=hparams.weight_decay, learning_rate_in_momentum=inside)]

    @staticmethod
    def _warmup_steps(cfg: RunConfig) -> int:
        hparams = cfg.workload.hparams
        return warmup_steps(hparams.warmup_epochs, cfg.benchmark.train_samples, cfg.global_batch)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare logged values (warm-up steps, batch-norm span) and what the closed division forbids.

        All readers use the same order of data.
        """
        own: Ssd300Config = cfg.workload
        broken = []
        if own.model.backbone != BACKBONES[0]:
            broken.append(f"model.backbone={own.model.backbone}: training starts from torchvision's {BACKBONES[0]}")
        if cfg.assets_dir is None:
            broken.append(f"assets_dir=null: training starts from torchvision's {BACKBONES[0]}, in assets_dir")
        return Declaration(
            data_format=FORMAT,
            initialised_tensors=initialised_tensors(own.facts.layers, len(own.facts.steps)),
            derived_values={
                "model_bn_span": cfg.micro_batch * own.hparams.bn_group,
                "warmup_steps": cls._warmup_steps(cfg),
            },
            forbidden=broken,
        )

    def build_step(self) -> TrainStep:
        """Build the step: accumulated micro-batches, then SGD."""
        hparams, facts, samples = self.own.hparams, self.own.facts, self.cfg.benchmark.train_samples
        schedule = warmup_then_falls(
            hparams.base_learning_rate,
            decay_steps(hparams.decay_epochs, samples, self.cfg.global_batch),
            facts.decay_factor,
            self._warmup_steps(self.cfg),
            hparams.warmup_factor,
            first_step=1 if hparams.variant == "nvidia" else 0,
        )
        return self.step_with(hparams.sgd(), schedule, loss_scale=self.own.model.loss_scale)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return smooth L1 loss of offsets plus cross-entropy with hard negatives, as a mean over the micro-batch.

        ``micro_batch`` has ``image`` (N, C, H, W), and ``class`` (N, A) and ``offsets`` (N, A, 4) from
        :class:`benchmarks.ssd300.targets.Targets`.
        """
        tensors, negatives = micro_batch.tensors, self.own.facts.negatives
        said = self.model(tensors["image"])
        losses = multibox_loss(said.logits, said.offsets, tensors["class"], tensors["offsets"], negatives)
        metrics = {"loss": losses.total, "classification_loss": losses.classes, "box_loss": losses.boxes}
        return Losses(losses.total, {name: value.detach() for name, value in metrics.items()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one random micro-batch with a few boxes, which has the shapes of every training micro-batch."""
        generator, count = self.layout.generator("example"), self.cfg.micro_batch
        room = self.own.reader.max_boxes  # capacity of the reader's batches; kernels are compiled for it
        boxes = {
            "boxes": torch.rand((count, room, 2, 2), generator=generator).sort(2).values.flatten(2),
            "label": torch.randint(1, self.own.facts.classes + 1, (count, room), generator=generator),
            "count": torch.full((count,), min(EXAMPLE_BOXES, room)),
        }
        image_NCHW = self._example_images(count, generator)
        yield self._with_targets(image_NCHW, self.to_device(boxes), self.nominal_samples)

    def _example_images(self, count: int, generator: torch.Generator) -> Tensor:
        size = self.own.facts.image_size
        image_NCHW = torch.randn((count, PADDED_CHANNELS, size, size), generator=generator)
        image_NCHW[:, 3:] = 0
        return image_NCHW.to(self.layout.device, self.dtype, memory_format=torch.channels_last)

    def prepare(self, batch: HostBatch) -> Batch:
        """Copy pictures and boxes to the device and match the boxes there."""
        tensors = self.to_device(batch.tensors)
        return self._with_targets(tensors["image"], tensors, batch.samples)

    def _with_targets(self, image_NCHW: Tensor, boxes: dict[str, Tensor], samples: int) -> Batch:
        class_NA, offsets_NA4 = self._targets(boxes["boxes"], boxes["label"], boxes["count"])
        return Batch({"image": image_NCHW, "class": class_NA, "offsets": offsets_NA4}, samples)

    def _data_settings(self) -> DataSettings:
        own = self.own
        return DataSettings(own.facts, own.reader, own.hparams.crop_attempts, self.dtype)

    def warm_up_reader(self) -> None:
        """Load DALI and run each of its operators once, if DALI is the reader."""
        warm_up(self._data_settings(), self.layout, self.cfg.micro_batch)

    def open_data(self, root: Path) -> DataSource:
        """Open the training pictures."""
        return open_train(
            root, self._data_settings(), self.layout, self.cfg.micro_batch, self.cfg.grad_accumulation_steps
        )

    def weights(self) -> Weights:
        """Return parameters, and batch-norm statistics averaged over the replicas."""
        return Weights({**super().weights().tensors, **averaged_statistics(self.model, self.layout)})

    def evaluation(self, layout: Layout) -> DetectionEvaluation:
        """Return the evaluation, COCO's mean average precision, on the ranks of ``layout``."""
        own, settings, batch = self.own, self._data_settings(), self.own.reader.eval_batch
        on_device = self.cfg.evaluation.scoring == "inline"
        detect = Detector(self.model, own.facts, own.model.implementations, layout.device)
        self.choices["suppression"] = detect.choice

        def open_source(root: Path) -> EvalSource:
            detect.name_classes(category_ids(root, settings))
            return open_eval(root, settings, layout, batch)

        return DetectionEvaluation(
            self.model,
            {(): of_pictures(detect, self._example_images(batch, layout.generator("example")))},
            open_source,
            own.facts.detections,
            layout,
            self.cfg.cuda_graphs,
            CocoScorer(ground_truth, layout.device if on_device else torch.device("cpu")),
        )

    def synthetic_evaluation(self, layout: Layout) -> DetectionEvaluation:
        """Return an evaluation of random pictures."""
        return self.evaluation(layout).with_noise(self.cfg.benchmark.eval_samples)

    def sample_flops(self) -> float:
        """Return the FLOPs to train on one picture."""
        return self.model.sample_flops(self.own.facts.image_size)
