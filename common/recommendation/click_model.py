"""A click model: a dense network around embeddings, from a batch of samples to logits and loss.

Legend: B samples, D dense features, L ids of a sample, W width of an embedding, X = (1 + tables) W.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from common.config.schema import RunConfig
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.ops.embedding_bags import AdagradRows, Rule
from common.optim.precision import DTYPES
from common.recommendation.click_network import ClickNetwork, loss
from common.recommendation.config import EmbeddingSettings
from common.recommendation.embeddings import ShardedEmbeddings
from common.recommendation.made_up_ids import Distribution, made_up_ids
from common.recommendation.planner import make_plan
from common.recommendation.tables import Tables
from common.step.train_step import Losses

PROBED_ROWS = 1 << 12
"""Of a table where only the memory of an iteration is measured."""


class Embeddings(Protocol):
    """Gives x0."""

    def start(self, ids_BL: Tensor) -> None:
        """Begin to look up these ids beside what is computed meanwhile."""

    def forward(self, bottom_BW: Tensor, ids_BL: Tensor) -> Tensor:
        """x0 (B, X): ``bottom_BW``, then the vectors of all tables. Collective."""


class ClickModel:
    """Network and embeddings as one function.

    Args:
        network: bottom MLP and all that follows the embeddings.
        embeddings: of all tables.
    """

    def __init__(self, network: ClickNetwork, embeddings: Embeddings) -> None:
        self._network, self._embeddings = network, embeddings

    def logits(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Logits (B,) of ``dense`` (B, D) and ``ids`` (B, L), int32. Collective; capturable."""
        ids_BL = tensors["ids"]
        self._embeddings.start(ids_BL)
        return self._network.head(self._embeddings.forward(self._network.bottom(tensors["dense"]), ids_BL))

    def loss(self, micro_batch: Batch) -> Losses:
        """Binary cross-entropy of the logits with ``label`` (B,), the mean over the micro-batch."""
        logit_B = self.logits(micro_batch.tensors)
        label_B = micro_batch.tensors["label"].to(logit_B.dtype)
        mean = loss(logit_B, label_B)
        return Losses(mean, {"loss": mean.detach()})


def sharded_embeddings(
    tables: Tables,
    settings: EmbeddingSettings,
    implementation: str,
    rule: Rule,
    layout: Layout,
    ranks_per_node: int,
    dtype: torch.dtype,
) -> tuple[ShardedEmbeddings, str]:
    """Embeddings by the plan that a recipe asks for. Collective.

    Args:
        tables: the tables.
        settings: section ``embeddings`` of the recipe.
        implementation: of :mod:`common.ops.embedding_bags`.
        rule: how rows will be updated: whether they have a state.
        layout: the ranks.
        ranks_per_node: of them.
        dtype: of the network; the rows are in fp64 with it, for checks.

    Returns:
        The embeddings, and their plan as a text.

    Raises:
        ConfigError: there is no such plan, or the tables do not fit.
    """
    rows_dtype, row_bytes = _rows(tables, settings, rule, dtype)
    plan = make_plan(tables, settings.plan, layout.world_size, ranks_per_node, row_bytes, settings)
    made = ShardedEmbeddings(
        plan,
        layout,
        dtype=dtype,
        rows_dtype=rows_dtype,
        implementation=implementation,
        ranks_per_node=ranks_per_node,
        overlap=settings.overlap,
    )
    return made, plan.text(row_bytes)


def probed(cfg: RunConfig) -> RunConfig:
    """The configuration with short tables, which one rank holds, and an iteration of one micro-batch.

    A micro-batch needs as much memory beside the tables as with the real ones.
    """
    own = cfg.workload
    facts = replace(own.facts, table_rows=tuple(min(rows, PROBED_ROWS) for rows in own.facts.table_rows))
    workload = replace(own, facts=facts, embeddings=replace(own.embeddings, plan="row_wise"))
    return replace(cfg, grad_accumulation_steps=1, workload=workload)


def table_bytes(cfg: RunConfig, rule: Rule) -> int:
    """Bytes of rows and their state on the rank that holds most. Collective, as :func:`make_plan`.

    Args:
        cfg: of a workload with ``facts.tables`` and ``embeddings``.
        rule: how rows will be updated.

    Raises:
        ConfigError: there is no such plan, or the tables do not fit.
    """
    tables, settings = cfg.workload.facts.tables, cfg.workload.embeddings
    _, row_bytes = _rows(tables, settings, rule, DTYPES[cfg.precision])
    ranks = math.prod(cfg.layout.values())
    plan = make_plan(tables, settings.plan, ranks, cfg.scale.gpus_per_node, row_bytes, settings)
    return plan.fullest_bytes(row_bytes)


def row_bytes(tables: Tables, settings: EmbeddingSettings, rule: Rule, precision: str) -> int:
    """Bytes of a row with its optimizer's state, for a network of this precision."""
    return _rows(tables, settings, rule, DTYPES[precision])[1]


def _rows(tables: Tables, settings: EmbeddingSettings, rule: Rule, dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The rows' dtype, and bytes of a row with its state; rows are in fp64 beside a network in fp64, for checks."""
    rows_dtype = torch.float64 if dtype == torch.float64 else DTYPES[settings.rows]
    state_bytes = max(4, rows_dtype.itemsize) if isinstance(rule, AdagradRows) else 0
    return rows_dtype, tables.width * (rows_dtype.itemsize + state_bytes)


def made_up(
    tables: Tables,
    dense_features: int,
    samples: int,
    distribution: Distribution,
    generator: torch.Generator,
    device: torch.device,
) -> dict[str, Tensor]:
    """Samples without a meaning, as a reader decodes them.

    Args:
        tables: of the ids.
        dense_features: D.
        samples: B.
        distribution: of the ids, see :mod:`common.recommendation.made_up_ids`.
        generator: of the CPU.
        device: of the tensors.

    Returns:
        ``label`` (B,) and ``dense`` (B, D), float32; ``ids`` (B, L), int32.
    """
    made = {
        "label": torch.randint(2, (samples,), generator=generator).float(),
        "dense": 4 * torch.rand((samples, dense_features), generator=generator),
        "ids": made_up_ids(tables, samples, distribution, generator),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}
