"""DLRM-DCNv2 workload: network, and Adagrad with a constant learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.dlrm_dcnv2.config import DlrmDcnv2Config
from benchmarks.dlrm_dcnv2.data import FORMAT
from benchmarks.dlrm_dcnv2.model import DlrmDcnv2Network
from common.config.schema import Declaration, RunConfig
from common.ops.embedding_bags import AdagradRows
from common.optim.learning_rate import constant
from common.optim.optimizer import ParameterGroup
from common.optim.rules import Rule
from common.recommendation.click_workload import ClickPrediction


class DlrmDcnv2(ClickPrediction):
    """Click prediction with DLRM-DCNv2."""

    config_type: ClassVar[type] = DlrmDcnv2Config
    title = "DLRM-DCNv2"
    sample_format = FORMAT
    own: DlrmDcnv2Config

    def network(self, generator: torch.Generator) -> DlrmDcnv2Network:
        """Build the dense network with the cross network."""
        own = self.own
        names, tables = own.model.implementations, len(own.facts.tables)
        return DlrmDcnv2Network(own.facts, tables, names, self.layout.device, self.dtype, generator)

    @classmethod
    def row_rule(cls, cfg: RunConfig) -> AdagradRows:
        """Return Adagrad, the rule of the dense weights too."""
        return AdagradRows(cfg.workload.hparams.epsilon)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return one group with all dense parameters, by layer, so that a gradient bucket is final with its layers."""
        assert isinstance(self.model, DlrmDcnv2Network)
        return [ParameterGroup(self.model.parameters_by_layer())]

    def dense_rule(self) -> Rule:
        """Return Adagrad."""
        return self.own.hparams.adagrad()

    def learning_rate(self) -> Callable[[Tensor], Tensor]:
        """Return the constant schedule."""
        return constant(self.own.hparams.base_learning_rate)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the run. The logged values follow from Adagrad: its sums start at 0 and its rate is constant."""
        return Declaration(
            data_format=FORMAT.name,
            schedule_options={"train_samples": cfg.benchmark.train_samples},
            largest_micro_batch=cfg.global_batch,
            derived_values={
                "initial_accumulator": 0.0,
                "learning_rate_decay": 0.0,
                "weight_decay": 0.0,
                "warmup_steps": 0,
                "decay_start_step": 0,
                "decay_steps": 0,
            },
        )
