"""The workload: combines model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data import manifest
from common.data.batches import Batch, DataSource
from common.data.staging import SourceFile, StagingPlan
from common.distributed.layout import Layout
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep
from tests.toy.config import ToyConfig
from tests.toy.data import FORMAT, PREPARE_COMMAND, TrainSource
from tests.toy.evaluate import MeanAbsoluteError
from tests.toy.model import VolumeRegression


class Toy(Workload):
    """Estimation of parameters from volumes."""

    config_type: ClassVar[type] = ToyConfig
    title = "Toy"
    own: ToyConfig

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        facts, generator = self.own.facts, layout.shared_generator("weights")
        network = VolumeRegression(facts.size**3, self.own.model.width, facts.parameters, generator)
        self.model = network.to(layout.device, self.dtype)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the data format."""
        return Declaration(data_format=FORMAT)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return weights with decay, and biases without."""
        named = dict(self.model.named_parameters())
        weights = {name: parameter for name, parameter in named.items() if parameter.ndim > 1}
        biases = {name: parameter for name, parameter in named.items() if parameter.ndim == 1}
        return [ParameterGroup(weights, weight_decay=self.own.hparams.weight_decay), ParameterGroup(biases)]

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean squared error over the micro-batch."""
        estimate_BP = self.model(micro_batch.tensors["volume"])
        mean = torch.nn.functional.mse_loss(estimate_BP, micro_batch.tensors["parameters"])
        return Losses(mean, {"loss": mean.detach()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one micro-batch of noise; all training batches have the same shape."""
        volume_BV = self._noise(self.cfg.micro_batch)
        parameters_BP = torch.zeros(len(volume_BV), self.own.facts.parameters, dtype=self.dtype)
        yield Batch(self.to_device({"volume": volume_BV, "parameters": parameters_BP}), self.nominal_samples)

    def _noise(self, batch: int) -> Tensor:
        shape = batch, self.own.facts.size**3
        return torch.randn(shape, generator=self.layout.generator("example"), dtype=torch.float64).to(self.dtype)

    def build_step(self) -> TrainStep:
        """Return the step: accumulated micro-batches, then SGD with momentum."""
        hparams, steps_per_epoch = self.own.hparams, -(-self.cfg.benchmark.train_samples // self.cfg.global_batch)
        boundaries = [epoch * steps_per_epoch for epoch in hparams.decay_boundary_epochs]
        warmup_steps = max(1, hparams.warmup_epochs * steps_per_epoch)

        def schedule(step: Tensor) -> Tensor:
            done = (step.double() / warmup_steps).clamp(max=1.0)
            warmup = hparams.warmup_factor + (1.0 - hparams.warmup_factor) * done
            decays = sum((step >= boundary).double() for boundary in boundaries)
            return (hparams.base_learning_rate * warmup * hparams.decay_factor**decays).to(torch.float32)

        return self.step_with(hparams.sgd(), schedule)

    def staging(self, root: Path) -> StagingPlan:
        """Return all files, of which every node needs all: a sample is a part of a file."""
        files = manifest.read(root, FORMAT, PREPARE_COMMAND).files
        entries = [SourceFile(name, entry.bytes) for name, entry in files.items()]
        return StagingPlan({}, [*entries, SourceFile(manifest.NAME, (root / manifest.NAME).stat().st_size)])

    def open_data(self, root: Path) -> DataSource:
        """Open the training volumes."""
        return TrainSource(root, self.dtype, self.layout, self.cfg.micro_batch, self.cfg.grad_accumulation_steps)

    def evaluation(self, layout: Layout) -> MeanAbsoluteError:
        """Return the evaluation of the mean absolute error on the ranks of ``layout``."""
        example = self._noise(self.own.reader.eval_batch).to(layout.device)
        return MeanAbsoluteError(self.model, example, self.own.facts.parameters, layout, self.cfg.cuda_graphs)
