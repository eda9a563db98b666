"""The 3D U-Net workload: combines model, data, optimizer and evaluation.

Ranks along the ``cp`` axis of the layout share a volume: each has a slab of it (:mod:`common.distributed.spatial`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.unet3d.config import UNet3DConfig
from benchmarks.unet3d.data import VolumeDataSettings, VolumeSource, open_train, order_of_data, warm_up
from benchmarks.unet3d.evaluate import EvaluationSettings, MeanDice
from benchmarks.unet3d.model import UNet3D
from benchmarks.unet3d.ops.dice_cross_entropy import DICE_CROSS_ENTROPY
from benchmarks.unet3d.sliding_window import SlidingWindow
from benchmarks.unet3d.volumes import FORMAT
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, HostBatch
from common.distributed.layout import Layout
from common.distributed.spatial.split import VolumeSplit
from common.ops.operation import OperationRequest, select
from common.optim.learning_rate import warmup_then_constant
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep

NVIDIA_UNTIMED_STEPS = 20
"""Steps before ``run_start`` that NVIDIA's submissions count as part of the learning rate's warm-up."""


class UNet3DSegmentation(Workload):
    """Segmentation of kidneys and their tumours."""

    config_type: ClassVar[type] = UNet3DConfig
    title = "3D U-Net"
    axes: ClassVar[dict[str, str]] = {"dp": "are data-parallel (dp)", "cp": "share a volume (cp)"}
    own: UNet3DConfig
    model: UNet3D

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        facts, model = self.own.facts, self.own.model
        facts.check_size(facts.input_shape, layout.size("cp"))
        self._split = VolumeSplit.from_layout(layout)
        self.model = UNet3D(
            facts,
            layout.shared_generator("weights"),
            implementations=model.implementations,
            halo=model.halo,
            device=layout.device,
            dtype=self.dtype,
            split=self._split,
        )
        request = OperationRequest(layout.device, self.dtype, {"classes": facts.classes})
        self._loss = select(model.implementations, "dice_cross_entropy", DICE_CROSS_ENTROPY, request)
        self.choices |= {**self.model.chosen(), "dice_cross_entropy": self._loss.name}
        self._source: VolumeSource | None = None

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return a group of layers on slabs, and with a split, one of layers that every rank computes whole."""
        whole = self.model.redundant_parameters()
        named = dict(self.model.named_parameters())
        slabs = {name: parameter for name, parameter in named.items() if name not in whole}
        hparams = self.own.hparams
        decay, inside = hparams.weight_decay, hparams.variant == "nvidia"  # as in MXNet
        groups = [ParameterGroup(slabs, weight_decay=decay, learning_rate_in_momentum=inside)]
        if whole:
            redundant = {name: parameter for name, parameter in named.items() if name in whole}
            groups.append(
                ParameterGroup(redundant, weight_decay=decay, learning_rate_in_momentum=inside, replicated_over=("cp",))
            )
        return groups

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the schedule, the logged values and the data order.

        The rules count in epochs, padded to whole batches, and the learning rate is constant after the warm-up. SGD
        must use Nesterov momentum, which no log key shows. The data order is the division of volumes and the
        augmentation.
        """
        own: UNet3DConfig = cfg.workload
        samples, momentum = cfg.benchmark.train_samples, own.hparams.momentum
        plain = f"hparams.momentum={momentum:g}: the reference's SGD has Nesterov's momentum"
        return Declaration(
            data_format=FORMAT,
            schedule_options={"train_samples": samples},
            initialised_tensors=_initialised_tensors(),
            derived_values={
                "learning_rate_decay_boundary_epochs": [],
                "learning_rate_decay_factor": 1.0,
                "samples_per_epoch": _steps_of_epoch(cfg) * cfg.global_batch,
            },
            forbidden=[] if momentum > 0 else [plain],
            order_of_data=lambda: order_of_data(own.reader, own.hparams.augmentation, samples, cfg.layout["dp"]),
        )

    def build_step(self) -> TrainStep:
        """Return the step: accumulated micro-batches, then SGD with Nesterov momentum."""
        hparams = self.own.hparams
        nvidia, steps = hparams.variant == "nvidia", _steps_of_epoch(self.cfg)
        schedule = warmup_then_constant(
            hparams.base_learning_rate,
            hparams.initial_learning_rate,
            hparams.warmup_epochs * steps,
            steps_per_update=1 if nvidia else steps,
            offset=NVIDIA_UNTIMED_STEPS if nvidia else 0,
        )
        rule = hparams.sgd(nesterov=True)
        return self.step_with(rule, schedule, blocks=self.model.blocks, loss_scale=self.own.model.loss_scale)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return half the Dice loss plus half the cross-entropy, averaged over the crops of the micro-batch.

        ``micro_batch`` has this rank's slabs of ``image`` (N, 1, D, H, W) and ``label`` (N, D, H, W), uint8.
        """
        logits_NKDHW = self.model(micro_batch.tensors["image"])
        label_NDHW = micro_batch.tensors["label"]
        total = self._loss.function(logits_NKDHW, label_NDHW, self.own.facts.dice_smooth, self._split)
        return Losses(total, {"loss": total.detach()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one micro-batch of noise; all training batches have the same shape."""
        generator = self.layout.generator("example")
        size = self._data_settings().slab(self._split).shape
        count, facts, device = self.cfg.micro_batch, self.own.facts, self.layout.device
        label_NDHW = torch.randint(facts.classes, (count, *size), generator=generator, dtype=torch.uint8)
        # Crops are channels last in memory; with a single channel, conversions would not set such strides.
        image_NCDHW = torch.randn(count, *size, 1, generator=generator).to(device, self.dtype).movedim(-1, 1)
        yield Batch({"image": image_NCDHW, "label": label_NDHW.to(device)}, self.nominal_samples)

    def _data_settings(self) -> VolumeDataSettings:
        own = self.own
        return VolumeDataSettings(
            own.facts, own.reader, own.hparams.augmentation, self.dtype, own.model.implementations
        )

    def warm_up_reader(self) -> None:
        """Make crops from a synthetic volume."""
        warm_up(self._data_settings(), self.layout, self.cfg.micro_batch, self._split)

    def open_data(self, root: Path) -> VolumeSource:
        """Open the training volumes."""
        self._source = open_train(
            root,
            self._data_settings(),
            self.layout,
            self.cfg.micro_batch,
            self.cfg.grad_accumulation_steps,
            self._split,
        )
        return self._source

    def prepare(self, batch: HostBatch) -> Batch:
        """Make the crops of a micro-batch on the device."""
        assert self._source is not None, "open_data comes first"
        return Batch(self._source.prepare(batch), batch.samples, batch.key)

    def evaluation(self, layout: Layout) -> MeanDice:
        """Return the evaluation of mean Dice on the ranks of ``layout``."""
        facts, windows = self.own.facts, self.own.sliding_window
        window = SlidingWindow(facts.input_shape, facts.overlap, facts.padding_value)
        settings = EvaluationSettings(window, windows.batch, facts.dice_smooth)
        return MeanDice(self.model, settings, layout, self.dtype, capture=self.cfg.cuda_graphs)

    def synthetic_evaluation(self, layout: Layout) -> MeanDice:
        """Return an evaluation of volumes of noise."""
        return self.evaluation(layout).with_noise(self.cfg.benchmark.eval_samples)

    def sample_flops(self) -> float:
        """Return the FLOPs of training on one crop."""
        return self.own.facts.training_flops(self.own.facts.input_shape)


def _steps_of_epoch(cfg: RunConfig) -> int:
    """Return the number of steps in which every volume appears; the rules pad the last batch."""
    return math.ceil(cfg.benchmark.train_samples / cfg.global_batch)


def _initialised_tensors() -> list[str]:
    """Return the reference's names of the layers."""
    pairs = ["input_block", *(f"down{index}_block" for index in range(5))]
    names = [f"{pair}_{place}_{kind}" for pair in pairs for place in (0, 1) for kind in ("conv", "instancenorm")]
    for index in range(5):
        names.append(f"up{index}_deconv")
        names += [f"up{index}_block_{place}_{kind}" for place in (0, 1) for kind in ("conv", "instancenorm")]
    return [*names, "output_conv"]
