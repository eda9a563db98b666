"""Base of all click models as workloads: embeddings, two updaters, reader and evaluation.

A workload adds its network, the format of its samples, its update rules and its learning rate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from common.config.schema import RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, HostBatch
from common.data.order import MicroBatches
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.ops import embedding_bags
from common.optim.optimizer import ParameterGroup
from common.optim.rules import Rule
from common.recommendation.click_model import ClickModel, probed, sharded_embeddings, synthetic_batch, table_bytes
from common.recommendation.click_network import ClickNetwork
from common.recommendation.criteo.evaluation_rows import ClickEvaluationRows, open_evaluation
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.criteo.training_rows import TrainingRows, open_training
from common.recommendation.embedding_updater import EmbeddingUpdater
from common.recommendation.evaluation import ClickRanking
from common.step.train_step import Losses, TrainStep


class ClickPrediction(Workload):
    """Prediction of clicks on advertisements, by a dense network around embedding tables.

    Its configuration has ``facts`` with ``tables`` and ``dense_features``, ``model`` with a constant ``loss_scale``,
    ``embeddings`` and ``reader`` (:mod:`common.recommendation.config`).
    """

    sample_format: ClassVar[SampleFormat]
    """Format of the prepared samples."""
    model: ClickNetwork

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own = self.own
        if cfg.evaluation.ranks:
            raise ConfigError(
                f"evaluation.ranks={cfg.evaluation.ranks}: {self.title}'s tables lie on the ranks that train, which "
                "alone can evaluate: use 0"
            )
        self.model = self.network(layout.shared_generator("weights"))
        self._scale = self.scaled(own.model.loss_scale, growth=1.0, backoff=1.0)
        self._embeddings, self._plan = sharded_embeddings(
            own.facts.tables,
            own.embeddings,
            own.model.implementations["embedding_bags"],
            self.row_rule(cfg),
            layout,
            cfg.scale.gpus_per_node,
            self.dtype,
        )
        self._clicks = ClickModel(self.model, self._embeddings)
        self.choices |= {**self.model.choices, **self._embeddings.choices}

    @abstractmethod
    def network(self, generator: torch.Generator) -> ClickNetwork:
        """Return the dense network, with initial weights from ``generator``."""

    @classmethod
    @abstractmethod
    def row_rule(cls, cfg: RunConfig) -> embedding_bags.Rule:
        """Return the update rule for rows of tables."""

    @abstractmethod
    def dense_rule(self) -> Rule:
        """Return the update rule for dense weights."""

    @abstractmethod
    def learning_rate(self) -> Callable[[Tensor], Tensor]:
        """Return the schedule for dense weights and rows; it maps the number of earlier updates to the rate."""

    @classmethod
    def probe(cls, cfg: RunConfig, layout: Layout) -> Workload:
        """Build the workload with short tables, because the real tables of all ranks do not fit one device."""
        return cls(probed(cfg), layout)

    @classmethod
    def unprobed_bytes(cls, cfg: RunConfig) -> float:
        """Return the bytes of the tables."""
        return table_bytes(cfg, cls.row_rule(cfg))

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return one group with all parameters of the dense network; the tables are not parameters."""
        return [ParameterGroup(dict(self.model.named_parameters()))]

    def build_step(self) -> TrainStep:
        """Build a step: accumulated micro-batches, then an update of both dense weights and rows, or of neither."""
        cfg, rate = self.cfg, self.learning_rate()
        rows = EmbeddingUpdater(
            self._embeddings,
            self.row_rule(cfg),
            rate,
            grad_divisor=cfg.grad_accumulation_steps * self.layout.size("dp"),
            micro_batches=cfg.grad_accumulation_steps,
            loss_scale=self._scale,
            stochastic_rounding=True,
        )
        return self.step_with(self.dense_rule(), rate, loss_scale=self._scale, beside=[rows])

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean binary cross-entropy over the micro-batch; see :mod:`common.recommendation.click_model`."""
        return self._clicks.loss(micro_batch)

    def example_batches(self) -> Iterable[Batch]:
        """Yield a synthetic micro-batch, whose ids follow ``embeddings.example_ids``."""
        yield Batch(self._synthetic_batch(self.cfg.micro_batch), self.nominal_samples)

    def _synthetic_batch(self, samples: int) -> dict[str, Tensor]:
        facts, layout = self.own.facts, self.layout
        return synthetic_batch(
            facts.tables,
            facts.dense_features,
            samples,
            self.own.embeddings.example_ids,
            layout.generator("example"),
            layout.device,
        )

    def open_data(self, root: Path) -> TrainingRows:
        """Open this rank's part of every global batch."""
        cfg, own, layout = self.cfg, self.own, self.layout
        mine = MicroBatches(cfg.micro_batch, cfg.grad_accumulation_steps, layout.size("dp"), layout.index("dp"))
        return open_training(root, self.sample_format, own.facts.tables, mine, layout.device, own.reader)

    def prepare(self, batch: HostBatch) -> Batch:
        """Copy rows to the device, and decode them there."""
        words_BW = batch.tensors["words"].to(self.layout.device, non_blocking=True)
        return Batch(self.sample_format.decode(words_BW), batch.samples, batch.key)

    def evaluation(self, layout: Layout) -> ClickRanking:
        """Return the evaluation, which computes the area under the ROC curve."""
        facts, reader = self.own.facts, self.own.reader
        example = self._synthetic_batch(reader.eval_batch)
        example["count"] = torch.full((), reader.eval_batch, dtype=torch.int64, device=layout.device)

        def open_source(root: Path) -> ClickEvaluationRows:
            ranks, rank = layout.size("dp"), layout.index("dp")
            chosen = self.sample_format
            return open_evaluation(root, chosen, facts.tables, reader.eval_batch, ranks, rank, layout.device, reader)

        checked = self._embeddings.checked
        return ClickRanking(
            self.model, self._clicks.logits, example, open_source, layout, self.cfg.cuda_graphs, checked
        )

    def sample_flops(self) -> float:
        """Return the FLOPs of the dense network; the embeddings need few."""
        return self.model.sample_flops()

    def memory_plan(self) -> str:
        """Return a text with the placement of the tables and their bytes with optimizer state."""
        return self._plan
