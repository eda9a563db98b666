"""CosmoFlow as a workload: combines model, data, optimizer and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.cosmoflow.config import CosmoFlowConfig
from benchmarks.cosmoflow.data import open_eval, open_train, staging_plan
from benchmarks.cosmoflow.evaluate import evaluation_of
from benchmarks.cosmoflow.model import CosmoFlow
from benchmarks.cosmoflow.samples import FORMAT, PARAMETERS, REDSHIFTS
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource
from common.data.staging import StagingPlan
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation
from common.optim.learning_rate import stepwise
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep


class CosmoFlowRegression(Workload):
    """Regression of cosmological parameters from dark-matter particle counts."""

    config_type: ClassVar[type] = CosmoFlowConfig
    title = "CosmoFlow"
    peers = "benchmarks.cosmoflow.peer"
    own: CosmoFlowConfig
    model: CosmoFlow

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        self.model = CosmoFlow(
            self.own.facts,
            self.own.hparams.dropout,
            self.own.model.implementations,
            layout.shared_generator("weights"),
            device=layout.device,
            dtype=self.dtype,
        )
        self.choices |= self.model.chosen()

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the data format."""
        return Declaration(data_format=FORMAT)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the kernels of the hidden dense layers, which alone have weight decay, and all other parameters.

        The learning rate is inside the momentum buffer, as in Keras.
        """
        hidden = {f"{name}.weight" for name, _, _ in self.own.facts.dense[:-1]}
        named = dict(self.model.named_parameters())
        decayed = {name: parameter for name, parameter in named.items() if name in hidden}
        others = {name: parameter for name, parameter in named.items() if name not in hidden}
        return [ParameterGroup(decayed, weight_decay=self.own.hparams.gradient_decay), ParameterGroup(others)]

    def build_step(self) -> TrainStep:
        """Return the step: accumulated micro-batches, then SGD with momentum."""
        hparams = self.own.hparams
        schedule = stepwise(
            hparams.base_learning_rate,
            hparams.base_learning_rate / hparams.warmup_factor,
            hparams.warmup_epochs,
            hparams.first_decayed_epochs,
            hparams.decay_factors,
            math.ceil(self.cfg.benchmark.train_samples / self.cfg.global_batch),
        )
        return self.step_with(hparams.sgd(), schedule, blocks=self.model.blocks, loss_scale=self.own.model.loss_scale)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean squared error over the micro-batch and the parameters, without the penalty of weight decay.

        ``micro_batch`` has ``x`` (N, D, H, W, C) int16, ``y`` (N, P) fp32, and ``seed``, 0-d int64, of dropout.
        """
        tensors = micro_batch.tensors
        estimate_NP = self.model(tensors["x"], tensors["seed"])
        mean = torch.nn.functional.mse_loss(estimate_NP, tensors["y"].to(estimate_NP.dtype))
        return Losses(mean, {"loss": mean.detach()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one micro-batch of noise; all training batches have the same shape."""
        seed = torch.ones((), dtype=torch.int64, device=self.layout.device)
        yield Batch({**self._noise(self.cfg.micro_batch), "seed": seed}, self.nominal_samples)

    def _noise(self, count: int) -> dict[str, Tensor]:
        generator, size = self.layout.generator("example"), self.own.facts.size
        x_NDHWC = torch.randint(16, (count, size, size, size, REDSHIFTS), generator=generator, dtype=torch.int16)
        y_NP = 2 * torch.rand(count, PARAMETERS, generator=generator) - 1
        return {"x": x_NDHWC.to(self.layout.device), "y": y_NP.to(self.layout.device)}

    def staging(self, root: Path) -> StagingPlan:
        """Return the training and evaluation cubes, which TFRecords with gzip are inflated to."""
        return staging_plan(root, self.own.facts.size)

    def open_data(self, root: Path) -> DataSource:
        """Open the training cubes."""
        cfg = self.cfg
        return open_train(
            root, self.own.facts.size, self.own.reader, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps
        )

    def evaluation(self, layout: Layout) -> CountedEvaluation:
        """Return the evaluation of the mean absolute error on the ranks of ``layout``."""
        reader, size = self.own.reader, self.own.facts.size
        example = self._noise(reader.eval_batch)
        example["weight"] = torch.ones(reader.eval_batch, device=layout.device)
        return evaluation_of(
            self.model, example, lambda root: open_eval(root, size, reader, layout), layout, self.cfg.cuda_graphs
        )

    def sample_flops(self) -> float:
        """Return the FLOPs of training on one cube."""
        return self.own.facts.training_flops()
