"""DLRM workload: network, SGD, and a learning rate with warm-up, plateau and decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.dlrm.config import DlrmConfig
from benchmarks.dlrm.data import FORMAT
from benchmarks.dlrm.model import DlrmNetwork
from common.config.schema import Declaration, RunConfig
from common.ops.embedding_bags import SgdRows
from common.optim.learning_rate import held_polynomial
from common.optim.momentum import SGD
from common.recommendation.click_workload import ClickPrediction


class Dlrm(ClickPrediction):
    """Click prediction with DLRM."""

    config_type: ClassVar[type] = DlrmConfig
    title = "DLRM"
    sample_format = FORMAT
    own: DlrmConfig

    def network(self, generator: torch.Generator) -> DlrmNetwork:
        """Build the dense network with the dot interaction."""
        own = self.own
        names, tables = own.model.implementations, len(own.facts.tables)
        return DlrmNetwork(own.facts, tables, names, self.layout.device, self.dtype, generator)

    @classmethod
    def row_rule(cls, cfg: RunConfig) -> SgdRows:
        """Return SGD, the rule of the dense weights too."""
        return SgdRows()

    def dense_rule(self) -> SGD:
        """Return SGD without momentum."""
        return SGD(0.0)

    def learning_rate(self) -> Callable[[Tensor], Tensor]:
        """Return the schedule: warm-up, plateau, polynomial decay."""
        hparams = self.own.hparams
        return held_polynomial(
            hparams.base_learning_rate,
            hparams.warmup_steps,
            hparams.decay_start_steps,
            hparams.decay_steps,
            self.own.facts.decay_power,
        )

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the run. Evaluation intervals follow from the sample count; older rounds log initialised tensors."""
        facts = cfg.workload.facts
        layers = [("bottom_mlp", facts.bottom_mlp), ("top_mlp", facts.top_mlp)]
        dense = [f"{name}_dense{number}" for name, sizes in layers for number in range(1, len(sizes) + 1)]
        return Declaration(
            data_format=FORMAT.name,
            schedule_options={"train_samples": cfg.benchmark.train_samples},
            largest_micro_batch=cfg.global_batch,
            initialised_tensors=["embeddings", *dense],
        )
