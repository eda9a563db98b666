"""Base of all click models as workloads: embeddings, two updaters, reader and evaluation.

A workload adds its network, the format of its samples, its update rules and its learning rate.

B samples, D dense features, L ids of a sample.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
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
from common.optim.precision import DTYPES
from common.optim.rules import Rule
from common.recommendation.click_network import ClickNetwork, loss
from common.recommendation.config import EmbeddingSettings
from common.recommendation.criteo.evaluation_rows import ClickEvaluationRows, open_evaluation
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.criteo.training_rows import TrainingRows, open_training
from common.recommendation.embedding_updater import EmbeddingUpdater
from common.recommendation.embeddings import ShardedEmbeddings
from common.recommendation.evaluation import ClickRanking
from common.recommendation.peer_transport import PEER_MEMORY
from common.recommendation.placement import Placement
from common.recommendation.planner import make_plan
from common.recommendation.tables import Tables, synthetic_ids
from common.step.train_step import Losses, TrainStep

PROBED_ROWS = 1 << 12
"""Largest number of rows of a table when only the memory of an iteration is measured."""


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
        rows_dtype, row_bytes = row_layout(own.facts.tables, own.embeddings, self.row_rule(cfg), self.dtype)
        plan = _plan_of(cfg, layout.world_size, row_bytes)
        self._embeddings = ShardedEmbeddings(
            plan,
            layout,
            dtype=self.dtype,
            rows_dtype=rows_dtype,
            implementation=own.model.implementations["embedding_bags"],
            ranks_per_node=cfg.ranks_per_node,
            overlap=own.embeddings.overlap,
            peer_batch=cfg.micro_batch if own.embeddings.exchange == PEER_MEMORY else None,
        )
        self._plan = plan.text(row_bytes)
        if self._embeddings.peer_bytes:
            self._plan += f"\nmapped by other ranks: {self._embeddings.peer_bytes / 1e9:.3f} GB on every rank"
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
        """Build the workload with short tables, because the real tables of all ranks do not fit one device.

        Apart from the tables, a micro-batch needs the same memory as with the real tables.
        """
        own = cfg.workload
        facts = replace(own.facts, table_rows=tuple(min(rows, PROBED_ROWS) for rows in own.facts.table_rows))
        workload = replace(own, facts=facts, embeddings=replace(own.embeddings, plan="row_wise"))
        return cls(replace(cfg, grad_accumulation_steps=1, workload=workload), layout)

    @classmethod
    def unprobed_bytes(cls, cfg: RunConfig) -> float:
        """Return the largest number of bytes of rows and their state on any rank. Collective."""
        own = cfg.workload
        _, row_bytes = row_layout(own.facts.tables, own.embeddings, cls.row_rule(cfg), DTYPES[cfg.precision])
        return _plan_of(cfg, math.prod(cfg.layout.values()), row_bytes).fullest_bytes(row_bytes)

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

    def logits(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return logits (B,) from ``dense`` (B, D) and ``ids`` (B, L), int32. Collective; capturable."""
        ids_BL = tensors["ids"]
        self._embeddings.start(ids_BL)  # the lookup runs concurrently with the bottom MLP
        return self.model.head(self._embeddings.forward(self.model.bottom(tensors["dense"]), ids_BL))

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean binary cross-entropy of the logits with ``label`` (B,) over the micro-batch."""
        logit_B = self.logits(micro_batch.tensors)
        mean = loss(logit_B, micro_batch.tensors["label"].to(logit_B.dtype))
        return Losses(mean, {"loss": mean.detach()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield a synthetic micro-batch, whose ids follow ``embeddings.example_ids``."""
        yield Batch(self._synthetic_batch(self.cfg.micro_batch), self.nominal_samples)

    def _synthetic_batch(self, samples: int) -> dict[str, Tensor]:
        """Return ``label`` (B,) and ``dense`` (B, D), float32, and ``ids`` (B, L), int32, as a reader does."""
        facts, generator = self.own.facts, self.layout.generator("example")
        tensors = {
            "label": torch.randint(2, (samples,), generator=generator).float(),
            "dense": 4 * torch.rand((samples, facts.dense_features), generator=generator),
            "ids": synthetic_ids(facts.tables, samples, self.own.embeddings.example_ids, generator),
        }
        return {name: tensor.to(self.layout.device) for name, tensor in tensors.items()}

    def open_data(self, root: Path) -> TrainingRows:
        """Open this rank's part of every global batch."""
        cfg, own, layout = self.cfg, self.own, self.layout
        part = MicroBatches(cfg.micro_batch, cfg.grad_accumulation_steps, layout.size("dp"), layout.index("dp"))
        return open_training(root, self.sample_format, own.facts.tables, part, layout.device, own.reader)

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
            rows, batch = self.sample_format, reader.eval_batch
            return open_evaluation(root, rows, facts.tables, batch, ranks, rank, layout.device, reader)

        checked = self._embeddings.checked
        return ClickRanking(self.model, self.logits, example, open_source, layout, self.cfg.cuda_graphs, checked)

    def sample_flops(self) -> float:
        """Return the FLOPs of the dense network; the embeddings need few."""
        return self.model.sample_flops()

    def memory_plan(self) -> str:
        """Return a text with the placement of the tables, their bytes with optimizer state, and shared memory."""
        return self._plan


def row_layout(
    tables: Tables, settings: EmbeddingSettings, rule: embedding_bags.Rule, dtype: torch.dtype
) -> tuple[torch.dtype, int]:
    """Return the rows' dtype, and the bytes of a row with its optimizer state.

    Args:
        rule: update rule of the rows, which determines whether they have a state.
    """
    rows_dtype = torch.float64 if dtype == torch.float64 else DTYPES[settings.rows]
    state_bytes = max(4, rows_dtype.itemsize) if isinstance(rule, embedding_bags.AdagradRows) else 0
    return rows_dtype, tables.width * (rows_dtype.itemsize + state_bytes)


def _plan_of(cfg: RunConfig, ranks: int, row_bytes: int) -> Placement:
    settings = cfg.workload.embeddings
    return make_plan(cfg.workload.facts.tables, settings.plan, ranks, cfg.ranks_per_node, row_bytes, settings)
