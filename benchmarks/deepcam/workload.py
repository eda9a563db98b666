"""DeepCAM as a workload: combines model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.deepcam.config import DeepCamConfig
from benchmarks.deepcam.data import open_eval, open_train, staging_plan
from benchmarks.deepcam.evaluate import evaluation_of
from benchmarks.deepcam.model import DeepLab, forward_flops, normalised, weighted_cross_entropy
from benchmarks.deepcam.samples import CHANNELS, CLASSES, FORMAT
from benchmarks.deepcam.schedule import cosine_annealing, multistep
from common.config.schema import Declaration, RunConfig
from common.contract.evaluation import Weights
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource
from common.data.staging import StagingPlan
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation
from common.nn.batch_norm import averaged_statistics, set_group
from common.optim.learning_rate import Schedule
from common.optim.optimizer import ClipNorm, ParameterGroup
from common.step.train_step import Losses, TrainStep


class DeepCamSegmentation(Workload):
    """Segmentation of tropical cyclones and atmospheric rivers in climate simulations."""

    config_type: ClassVar[type] = DeepCamConfig
    title = "DeepCAM"
    peers = "benchmarks.deepcam.peer"
    own: DeepCamConfig
    model: DeepLab

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own = self.own
        network = DeepLab(own.facts, own.model.low_level_relu, layout.shared_generator("weights"))
        self.model = network.cast(self.dtype).to(layout.device)
        self.choices |= self.model.choose_implementations(own.model.implementations, self.dtype)
        set_group(self.model, layout.subgroup("dp", own.hparams.bn_group))
        self._class_weights = torch.tensor(own.facts.class_weights, device=layout.device)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the data format and the values of the log that no setting changes: the formula of LAMB."""
        own: DeepCamConfig = cfg.workload
        rule = own.hparams.lamb()
        constants = {"optimizer": type(rule).__name__, "grad_averaging": True, "bias_correction": rule.bias_correction}
        return Declaration(data_format=FORMAT, derived_values=constants)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return one group: weight decay and trust ratio are for all parameters, also biases and batch norms."""
        named = dict(self.model.named_parameters())
        return [ParameterGroup(named, weight_decay=self.own.hparams.weight_decay, trust_ratio=True)]

    def build_step(self) -> TrainStep:
        """Return the step: accumulated micro-batches, then LAMB on the clipped mean gradient."""
        own = self.own
        return self.step_with(
            own.hparams.lamb(),
            self._schedule(),
            clip=ClipNorm(own.facts.max_grad_norm, "after_reduction"),
            loss_scale=own.model.loss_scale,
        )

    def _schedule(self) -> Schedule:
        hparams = self.own.hparams
        if hparams.scheduler == "multistep":
            return multistep(hparams.warm_up(), hparams.milestones, hparams.decay_rate)
        return cosine_annealing(hparams.warm_up(), hparams.t_max, hparams.eta_min)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the weighted cross-entropy, a mean over the pixels of the micro-batch.

        ``micro_batch`` has ``x`` (N, H, W, C) fp32, ``y`` (N, H, W) uint8, and ``shift`` and ``scale`` (C,) fp32, which
        normalise ``x``.
        """
        tensors = micro_batch.tensors
        logits_NKHW = self.model(normalised(tensors["x"], tensors["shift"], tensors["scale"], self.dtype))
        weight_K = self._class_weights.to(logits_NKHW.dtype)
        mean = weighted_cross_entropy(logits_NKHW, tensors["y"], weight_K)
        return Losses(mean, {"loss": mean.detach()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one micro-batch of noise; all training batches have the same shape."""
        yield Batch(self._noise(self.cfg.micro_batch), self.nominal_samples)

    def _noise(self, count: int) -> dict[str, Tensor]:
        generator, size = self.layout.generator("example"), self.own.facts.image_size
        made = {
            "x": torch.rand(count, *size, CHANNELS, generator=generator),
            "y": torch.randint(CLASSES, (count, *size), generator=generator, dtype=torch.uint8),
            "shift": torch.zeros(CHANNELS),
            "scale": torch.ones(CHANNELS),
        }
        return {name: tensor.to(self.layout.device) for name, tensor in made.items()}

    def staging(self, root: Path) -> StagingPlan:
        """Return the files of the training and validation samples."""
        return staging_plan(root, self.own.facts.image_size)

    def open_data(self, root: Path) -> DataSource:
        """Open the training samples."""
        cfg, own = self.cfg, self.own
        return open_train(
            root, own.facts.image_size, own.reader, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps
        )

    def weights(self) -> Weights:
        """Return parameters, and batch-norm statistics averaged over the replicas (one all-reduce)."""
        return Weights({**super().weights().tensors, **averaged_statistics(self.model, self.layout)})

    def evaluation(self, layout: Layout) -> CountedEvaluation:
        """Return the evaluation of the mean IoU on the ranks of ``layout``."""
        reader, size = self.own.reader, self.own.facts.image_size
        example = self._noise(reader.eval_batch)
        example["weight"] = torch.ones(reader.eval_batch, device=layout.device)
        return evaluation_of(
            self.model, self.dtype, example, lambda root: open_eval(root, size, reader, layout), layout,
            self.cfg.cuda_graphs,
        )  # fmt: skip

    def sample_flops(self) -> float:
        """Return the FLOPs of training on one sample: three forward passes."""
        return 3.0 * forward_flops(self.own.facts)[""]
