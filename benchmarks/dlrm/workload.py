"""DLRM as a workload: wires network, embeddings, optimizers, reader and evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.dlrm import data
from benchmarks.dlrm.config import DlrmConfig
from benchmarks.dlrm.model import DenseNetwork
from benchmarks.dlrm.ops import dot_interaction
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.ops.embedding_bags import SgdRows
from common.optim.learning_rate import held_polynomial
from common.optim.momentum import SGD
from common.optim.optimizer import ParameterGroup
from common.optim.precision import LossScale
from common.recommendation.click_model import ClickModel, made_up, probed, sharded_embeddings, table_bytes
from common.recommendation.criteo.evaluation_rows import EvaluationRows
from common.recommendation.criteo.training_rows import TrainingRows
from common.recommendation.embedding_updater import EmbeddingUpdater
from common.recommendation.evaluation import ClickRanking
from common.step.train_step import Losses, TrainStep


class Dlrm(Workload):
    """Clicks on advertisements with DLRM."""

    config_type: ClassVar[type] = DlrmConfig
    title = "DLRM"
    own: DlrmConfig
    model: DenseNetwork

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own, tables = self.own, self.own.facts.tables
        if cfg.evaluation.ranks:
            raise ConfigError(
                f"evaluation.ranks={cfg.evaluation.ranks}: {self.title}'s tables lie on the ranks that train, which "
                "alone can evaluate: use 0"
            )
        generator = layout.shared_generator("weights")
        self.model = DenseNetwork(own.facts, len(tables), own.model, layout.device, self.dtype, generator)
        self._scale = LossScale(layout.device, self.dtype, own.model.loss_scale, growth=1.0, backoff=1.0)
        self._schedule = held_polynomial(
            own.hparams.base_learning_rate,
            own.hparams.warmup_steps,
            own.hparams.decay_start_steps,
            own.hparams.decay_steps,
            own.facts.decay_power,
        )
        self._rule = SgdRows()
        self._embeddings, self._plan = sharded_embeddings(
            tables, own.embeddings, self._rule, layout, cfg.scale.gpus_per_node, self.dtype
        )
        self._clicks = ClickModel(self.model, self._embeddings)
        self.choices |= {**self.model.choices, **self._embeddings.choices}

    @classmethod
    def probe(cls, cfg: RunConfig, layout: Layout) -> Workload:
        """With short tables: those of all ranks fit no device."""
        return cls(probed(cfg), layout)

    @classmethod
    def unprobed_bytes(cls, cfg: RunConfig) -> float:
        """The tables."""
        return table_bytes(cfg, SgdRows())

    def parameter_groups(self) -> list[ParameterGroup]:
        """All of the dense network, alike; tables are no parameters."""
        return [ParameterGroup(dict(self.model.named_parameters()))]

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Evaluations follow from the number of samples; older rounds log which weights were initialised."""
        facts = cfg.workload.facts
        layers = [("bottom_mlp", facts.bottom_mlp), ("top_mlp", facts.top_mlp)]
        dense = [f"{name}_dense{number}" for name, sizes in layers for number in range(1, len(sizes) + 1)]
        return Declaration(
            schedule_options={"train_samples": cfg.benchmark.train_samples},
            largest_micro_batch=cfg.global_batch,
            initialised_tensors=["embeddings", *dense],
        )

    def build_step(self) -> TrainStep:
        """Accumulated micro-batches, then SGD without momentum, of dense weights and of rows."""
        cfg = self.cfg
        rows = EmbeddingUpdater(
            self._embeddings,
            self._rule,
            self._schedule,
            grad_divisor=cfg.grad_accumulation_steps * self.layout.size("dp"),
            micro_batches=cfg.grad_accumulation_steps,
            loss_scale=self._scale,
            stochastic_rounding=True,
        )
        return self.step_with(SGD(0.0), self._schedule, loss_scale=self._scale, beside=[rows])

    def loss(self, micro_batch: Batch) -> Losses:
        """Binary cross-entropy, the mean over the micro-batch; see :mod:`common.recommendation.click_model`."""
        return self._clicks.loss(micro_batch)

    def example_batches(self) -> Iterable[Batch]:
        """A micro-batch whose ids are as ``embeddings.example_ids`` says."""
        yield Batch(self._made_up(self.cfg.micro_batch), self.nominal_samples)

    def _made_up(self, samples: int) -> dict[str, Tensor]:
        facts, layout = self.own.facts, self.layout
        return made_up(
            facts.tables,
            facts.dense_features,
            samples,
            self.own.embeddings.example_ids,
            layout.generator("example"),
            layout.device,
        )

    def open_data(self, root: Path) -> TrainingRows:
        """Open this rank's part of every global batch."""
        cfg, own = self.cfg, self.own
        return data.open_training(
            root, own.facts.tables, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps, own.reader
        )

    def prepare(self, batch: HostBatch) -> Batch:
        """Copy rows to the device, and take them apart there."""
        words_BW = batch.tensors["words"].to(self.layout.device, non_blocking=True)
        return Batch(data.FORMAT.decode(words_BW), batch.samples, batch.key)

    def evaluation(self, layout: Layout) -> ClickRanking:
        """The area under the ROC curve."""
        own = self.own
        example = self._made_up(own.reader.eval_batch)
        example["count"] = torch.full((), own.reader.eval_batch, dtype=torch.int64, device=layout.device)

        def open_source(root: Path) -> EvaluationRows:
            return data.open_evaluation(root, own.facts.tables, layout, own.reader.eval_batch, own.reader)

        return ClickRanking(self.model, self._clicks.logits, example, open_source, layout, self.cfg.cuda_graphs)

    def sample_flops(self) -> float:
        """Of the dense network; those of the embeddings are few."""
        return self.model.sample_flops()

    def kernel_names(self) -> Sequence[tuple[str, str]]:
        """Of the operations that only this workload has."""
        return list(dot_interaction.KERNEL_NAMES)

    def memory_plan(self) -> str:
        """Where the tables are, and how many bytes they take with their optimizer's state."""
        return self._plan
