"""SSD300 as a workload: connects model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.ssd300.config import BACKBONES, Ssd300Config
from benchmarks.ssd300.data import FORMAT, Ssd300Data, ground_truth
from benchmarks.ssd300.detect import Detector
from benchmarks.ssd300.model import SSD300, multibox_loss
from benchmarks.ssd300.schedule import decay_steps, warmup_steps, warmup_then_falls
from benchmarks.ssd300.targets import Targets
from common.config.schema import Declaration, RunConfig
from common.contract.evaluation import Weights
from common.data.batches import Batch
from common.detection.annotations import Annotations
from common.detection.detection_workload import SquareDetection
from common.distributed.layout import Layout
from common.nn.backbone_file import load_backbone
from common.nn.batch_norm import averaged_statistics, set_group
from common.nn.resnet import PADDED_CHANNELS
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep


class Ssd300Detection(SquareDetection):
    """Object detection with SSD300."""

    config_type: ClassVar[type] = Ssd300Config
    title = "SSD300"
    backbone_file = BACKBONES[0]
    channels = PADDED_CHANNELS
    first_class = 1
    own: Ssd300Config
    model: SSD300
    data: Ssd300Data

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        set_group(self.model, layout.subgroup("dp", self.own.hparams.bn_group))
        self._targets = Targets(self.own.facts, self.own.model.implementations, layout.device)
        self.choices["anchor_matching"] = self._targets.choice

    def network(self, generator: torch.Generator) -> SSD300:
        """Return the network."""
        return SSD300(self.own.facts, generator)

    @staticmethod
    def load_backbone(network: SSD300, path: Path) -> None:
        """Load the initial weights of the backbone from a file."""
        load_backbone(path, network.backbone)

    def picture_data(self) -> Ssd300Data:
        """Return the description of the data."""
        return Ssd300Data(self.own.facts, self.own.reader, self.dtype, self.own.hparams.crop_attempts)

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
        return Declaration(
            data_format=FORMAT,
            initialised_tensors=initialised_tensors(own.facts.layers, len(own.facts.steps)),
            derived_values={
                "model_bn_span": cfg.micro_batch * own.hparams.bn_group,
                "warmup_steps": cls._warmup_steps(cfg),
            },
            forbidden=cls.forbidden_backbone(cfg),
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
        outputs = self.model(tensors["image"])
        losses = multibox_loss(outputs.logits, outputs.offsets, tensors["class"], tensors["offsets"], negatives)
        metrics = {"loss": losses.total, "classification_loss": losses.classes, "box_loss": losses.boxes}
        return Losses(losses.total, {name: value.detach() for name, value in metrics.items()})

    def box_scale(self) -> float:
        """Return 1, because boxes are fractions of the picture."""
        return 1.0

    def targets(self, boxes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``class`` (N, A) and ``offsets`` (N, A, 4) of each default box."""
        class_NA, offsets_NA4 = self._targets(boxes["boxes"], boxes["label"], boxes["count"])
        return {"class": class_NA, "offsets": offsets_NA4}

    def weights(self) -> Weights:
        """Return parameters, and batch-norm statistics averaged over the replicas."""
        return Weights({**super().weights().tensors, **averaged_statistics(self.model, self.layout)})

    def detector(self, layout: Layout) -> Detector:
        """Return the detector of an evaluation."""
        return Detector(self.model, self.own.facts, self.own.model.implementations, layout.device)

    def name_classes(self, detector: Detector, root: Path) -> None:
        """Give the detector COCO's category ids."""
        detector.name_classes(self.data.category_ids(root))

    def ground_truth(self) -> Callable[[Path], Annotations]:
        """Return the function that reads the boxes with which detections are compared."""
        return ground_truth


def initialised_tensors(layers: Sequence[int], levels: int) -> list[str]:
    """Return the names of all weights, biases and batch-norm parameters, as in NVIDIA's MXNet network of round v1.1.

    A level has one predictor for classes and offsets.

    Args:
        layers: basic blocks in each stage of the backbone.
        levels: number of feature maps in which boxes are predicted.
    """
    backbone = "ssd0_resnetmlperf0"
    names = [f"{backbone}_conv0_weight", *_parts(f"{backbone}_batchnorm0", "gamma", "beta")]
    for stage, blocks in enumerate(layers, 1):
        for number in range(2 * blocks + (stage > 1)):  # plus the shortcut of the first block
            names += [f"{backbone}_stage{stage}_conv{number}_weight"]
            names += _parts(f"{backbone}_stage{stage}_batchnorm{number}", "gamma", "beta")
    biased = [f"ssd0_{kind}{number}" for number in range(levels - 1) for kind in ("expand_trans_conv", "expand_conv")]
    for layer in (*biased, *(f"ssd0_convpredictor{number}_conv0" for number in range(levels))):
        names += _parts(layer, "weight", "bias")
    return names


def _parts(layer: str, *parts: str) -> list[str]:
    return [f"{layer}_{part}" for part in parts]
