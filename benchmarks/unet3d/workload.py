"""3D U-Net as a workload: wires model, data, optimizer and evaluation.

Over the layout's ``cp`` axis ranks share a volume: each has a slab of it (:mod:`common.distributed.spatial`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from benchmarks.unet3d.config import UNet3DConfig
from benchmarks.unet3d.data import DataSettings, VolumeSource, open_train, order_of_data, warm_up
from benchmarks.unet3d.evaluate import EvaluationSettings, MeanDice
from benchmarks.unet3d.model import Architecture, Implementations, UNet3D
from benchmarks.unet3d.ops import dice_cross_entropy
from benchmarks.unet3d.sliding_window import SlidingWindow
from common.config import RunConfig
from common.data.source import Batch, HostBatch
from common.distributed.layout import Layout
from common.distributed.spatial.split import VolumeSplit
from common.errors import ConfigError, UnsupportedImplementation
from common.evaluation.base import Weights
from common.ops.implementation import OperationRequest, select
from common.optim.optimizer import Optimizer, ParameterGroup
from common.optim.rules import SGD
from common.optim.schedules import warmup_then_constant
from common.precision import DTYPES, LossScale
from common.step import TrainStep, accumulate
from common.workload import Losses, Workload

NVIDIA_UNTIMED_STEPS = 20
"""Iterations before ``run_start`` that NVIDIA's submissions leave counted in the warm-up of the learning rate."""


class UNet3DSegmentation(Workload):
    """Segmentation of kidneys and their tumours."""

    config_type: ClassVar[type] = UNet3DConfig

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own: UNet3DConfig = cfg.workload
        self.own = own
        for axis in ("pp", "tp"):
            if layout.size(axis) != 1:
                raise ConfigError(
                    f"layout.{axis}={layout.size(axis)}: 3D U-Net's ranks are data-parallel (dp) or share a volume "
                    "(cp), use 1"
                )
        facts = own.facts
        architecture = Architecture(1, facts.classes, facts.filters, facts.norm_epsilon)
        architecture.check_size(facts.input_shape, layout.size("cp"))
        self.dtype = DTYPES[cfg.precision]
        self._split = VolumeSplit.from_layout(layout)
        model = own.model
        self._network = UNet3D(
            architecture,
            Implementations(
                model.instance_norm,
                model.upsample,
                model.convolution,
                model.output_convolution,
                model.halo,
                model.overlap,
            ),
            layout.shared_generator("weights"),
            device=layout.device,
            dtype=self.dtype,
            split=self._split,
        )
        self._network.train()
        request = OperationRequest(layout.device, self.dtype, facts.classes)
        try:
            self._loss = select(dice_cross_entropy.IMPLEMENTATIONS, model.dice_cross_entropy, request)
        except UnsupportedImplementation as error:
            raise UnsupportedImplementation(f"model.dice_cross_entropy={model.dice_cross_entropy}: {error}") from error
        self._optimizer: Optimizer | None = None
        self._source: VolumeSource | None = None
        self._evaluation_choices: dict[str, str] = {}

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self._network

    def parameter_groups(self) -> list[ParameterGroup]:
        """Layers that ranks compute a slab of, whose gradients are partial sums, and those that they compute whole."""
        whole = self._network.redundant_parameters()
        named = dict(self._network.named_parameters())
        slabs = {name: parameter for name, parameter in named.items() if name not in whole}
        hparams = self.own.hparams
        decay, inside = hparams.weight_decay, hparams.variant == "nvidia"  # MXNet's momentum holds steps
        groups = [ParameterGroup(slabs, weight_decay=decay, learning_rate_in_momentum=inside)]
        if whole:
            redundant = {name: parameter for name, parameter in named.items() if name in whole}
            groups.append(
                ParameterGroup(redundant, weight_decay=decay, learning_rate_in_momentum=inside, replicated_over=("cp",))
            )
        return groups

    @classmethod
    def schedule_options(cls, cfg: RunConfig) -> dict[str, Any]:
        """The rules count in epochs of the training set."""
        return {"train_samples": cfg.benchmark.train_samples, **cfg.benchmark.schedule}

    @classmethod
    def initialised_tensors(cls, cfg: RunConfig) -> list[str]:
        """A name for each layer, as the reference has them."""
        pairs = ["input_block", *(f"down{index}_block" for index in range(5))]
        names = [f"{pair}_{place}_{kind}" for pair in pairs for place in (0, 1) for kind in ("conv", "instancenorm")]
        for index in range(5):
            names.append(f"up{index}_deconv")
            names += [f"up{index}_block_{place}_{kind}" for place in (0, 1) for kind in ("conv", "instancenorm")]
        return [*names, "output_conv"]

    @classmethod
    def derived_values(cls, cfg: RunConfig) -> dict[str, object]:
        """A constant learning rate after the warm-up, and the samples of an epoch of whole batches."""
        return {
            "learning_rate_decay_boundary_epochs": [],
            "learning_rate_decay_factor": 1.0,
            "samples_per_epoch": _steps_of_epoch(cfg) * cfg.global_batch,
        }

    @classmethod
    def closed_division(cls, cfg: RunConfig) -> list[str]:
        """The optimizer is the reference's: with Nesterov's momentum, which no key of the log shows."""
        momentum = cfg.workload.hparams.momentum
        return [] if momentum > 0 else [f"hparams.momentum={momentum:g}: the reference's SGD has Nesterov's momentum"]

    @classmethod
    def order_of_data(cls, cfg: RunConfig) -> str:
        """How volumes are dealt, and what the augmentation draws."""
        return order_of_data(cfg.workload.reader, cfg.benchmark.train_samples, cfg.layout["dp"])

    def build_step(self) -> TrainStep:
        """Accumulated micro-batches, then SGD with Nesterov momentum."""
        hparams, cfg = self.own.hparams, self.cfg
        nvidia, steps = hparams.variant == "nvidia", _steps_of_epoch(cfg)
        schedule = warmup_then_constant(
            hparams.base_learning_rate,
            hparams.initial_learning_rate,
            hparams.warmup_epochs * steps,
            steps_per_update=1 if nvidia else steps,
            offset=NVIDIA_UNTIMED_STEPS if nvidia else 0,
        )
        loss_scale = LossScale(self.layout.device, self.dtype, self.own.model.loss_scale)
        self._optimizer = Optimizer(
            self.parameter_groups(),
            SGD(hparams.momentum, nesterov=hparams.momentum > 0),
            schedule,
            self.layout,
            grad_divisor=cfg.grad_accumulation_steps * self.layout.size("dp"),
            ranks_per_node=cfg.scale.gpus_per_node,
            **cfg.optimizer.arguments(),
            blocks=self._network.blocks,
            loss_scale=loss_scale,
        )
        return TrainStep(accumulate(self.loss, loss_scale), [self._optimizer], self.layout)

    def loss(self, micro_batch: Batch) -> Losses:
        """Half the Dice loss plus half the cross-entropy; the mean over the crops of the micro-batch.

        ``micro_batch`` holds ``image`` (N, 1, D, H, W) and ``label`` (N, D, H, W), uint8; this rank's slabs of them.
        """
        logits_NKDHW = self._network(micro_batch.tensors["image"])
        label_NDHW = micro_batch.tensors["label"]
        total = self._loss.function(logits_NKDHW, label_NDHW, self.own.facts.dice_smooth, self._split)
        return Losses(total, {"loss": total.detach()})

    def example_batches(self) -> Iterable[Batch]:
        """One micro-batch of noise; all of training has the same shape."""
        generator = self.layout.generator("example")
        size = self._data_settings().slab(self._split).shape
        count, facts, device = self.cfg.micro_batch, self.own.facts, self.layout.device
        label_NDHW = torch.randint(facts.classes, (count, *size), generator=generator, dtype=torch.uint8)
        # A single channel has no strides of its own: this is what crops look like in memory, channels last.
        image_NCDHW = torch.randn(count, *size, 1, generator=generator).to(device, self.dtype).movedim(-1, 1)
        yield Batch({"image": image_NCDHW, "label": label_NDHW.to(device)}, self._nominal_samples)

    @property
    def _nominal_samples(self) -> int:
        return self.cfg.micro_batch * self.layout.size("dp")

    def _data_settings(self) -> DataSettings:
        return DataSettings(self.own.facts, self.own.reader, self.dtype)

    def warm_up_reader(self) -> None:
        """Make crops of a made-up volume."""
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

    def weights(self) -> Weights:
        """The network's own weights, with the last update."""
        if self._optimizer is not None:
            self._optimizer.materialize()
        return Weights(dict(self._network.named_parameters()))

    def evaluation(self, layout: Layout) -> MeanDice:
        """Mean Dice on the ranks of ``layout``."""
        facts, windows = self.own.facts, self.own.sliding_window
        window = SlidingWindow(facts.input_shape, facts.overlap, facts.padding_value)
        settings = EvaluationSettings(window, windows.batch, windows.share, facts.dice_smooth, windows.implementation)
        evaluation = MeanDice(self._network, settings, layout, self.dtype, capture=self.cfg.cuda_graphs)
        self._evaluation_choices = evaluation.choices
        return evaluation

    def sample_flops(self) -> float:
        """FLOPs of one crop."""
        return self._network.architecture.training_flops(self.own.facts.input_shape)

    def implementations(self) -> dict[str, str]:
        """The operations', and how gradients travel."""
        chosen = {**self._network.chosen(), "dice_cross_entropy": self._loss.name, **self._evaluation_choices}
        return {**chosen, **(self._optimizer.choices if self._optimizer is not None else {})}


def _steps_of_epoch(cfg: RunConfig) -> int:
    """Steps in which every volume appears: the rules pad the last batch."""
    return math.ceil(cfg.benchmark.train_samples / cfg.global_batch)
