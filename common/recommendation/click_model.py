"""A click model: a dense network around embeddings, from a batch of samples to logits and loss.

Shapes: B samples, D dense features, L ids of a sample, W width of an embedding, X = (1 + tables) W.
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
from common.recommendation.planner import make_plan
from common.recommendation.tables import Distribution, Tables, synthetic_ids
from common.step.train_step import Losses

PROBED_ROWS = 1 << 12
"""Largest number of rows of a table when only the memory of an iteration is measured."""


class TableEmbeddings(Protocol):
    """Computes x0, the input of the network's head."""

    def start(self, ids_BL: Tensor) -> None:
        """Start the lookup of these ids, concurrently with other computations."""

    def forward(self, bottom_BW: Tensor, ids_BL: Tensor) -> Tensor:
        """Return x0 (B, X): ``bottom_BW``, then the vectors of all tables. Collective."""


class ClickModel:
    """Network and embeddings as one function.

    Args:
        network: bottom MLP and head.
        embeddings: embeddings of all tables.
    """

    def __init__(self, network: ClickNetwork, embeddings: TableEmbeddings) -> None:
        self._network, self._embeddings = network, embeddings

    def logits(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return logits (B,) from ``dense`` (B, D) and ``ids`` (B, L), int32. Collective; capturable."""
        ids_BL = tensors["ids"]
        self._embeddings.start(ids_BL)
        return self._network.head(self._embeddings.forward(self._network.bottom(tensors["dense"]), ids_BL))

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the binary cross-entropy of the logits with ``label`` (B,), as mean over the micro-batch."""
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
    """Build the embeddings with the plan of a recipe. Collective.

    Args:
        settings: section ``embeddings`` of the recipe.
        implementation: implementation of :mod:`common.ops.embedding_bags`.
        rule: update rule of the rows, which determines whether they have a state.
        ranks_per_node: number of ranks per node.
        dtype: dtype of the network; if it is fp64, for checks, the rows are fp64 too.

    Returns:
        The embeddings, and their plan as text.

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
    """Return a configuration with short tables on one rank and one micro-batch per iteration.

    Apart from the tables, a micro-batch needs the same memory as with the real tables.
    """
    own = cfg.workload
    facts = replace(own.facts, table_rows=tuple(min(rows, PROBED_ROWS) for rows in own.facts.table_rows))
    workload = replace(own, facts=facts, embeddings=replace(own.embeddings, plan="row_wise"))
    return replace(cfg, grad_accumulation_steps=1, workload=workload)


def table_bytes(cfg: RunConfig, rule: Rule) -> int:
    """Return the largest number of bytes of rows and their state on any rank. Collective, as :func:`make_plan`.

    Args:
        cfg: configuration of a workload with ``facts.tables`` and ``embeddings``.
        rule: update rule of the rows.

    Raises:
        ConfigError: there is no such plan, or the tables do not fit.
    """
    tables, settings = cfg.workload.facts.tables, cfg.workload.embeddings
    _, row_bytes = _rows(tables, settings, rule, DTYPES[cfg.precision])
    ranks = math.prod(cfg.layout.values())
    plan = make_plan(tables, settings.plan, ranks, cfg.scale.gpus_per_node, row_bytes, settings)
    return plan.fullest_bytes(row_bytes)


def row_bytes(tables: Tables, settings: EmbeddingSettings, rule: Rule, precision: str) -> int:
    """Return the bytes of a row with its optimizer state.

    Args:
        rule: update rule of the tables.
        precision: precision of the network.
    """
    return _rows(tables, settings, rule, DTYPES[precision])[1]


def _rows(tables: Tables, settings: EmbeddingSettings, rule: Rule, dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """Return the rows' dtype and the bytes of a row with its state; rows are fp64 if the network is, for checks."""
    rows_dtype = torch.float64 if dtype == torch.float64 else DTYPES[settings.rows]
    state_bytes = max(4, rows_dtype.itemsize) if isinstance(rule, AdagradRows) else 0
    return rows_dtype, tables.width * (rows_dtype.itemsize + state_bytes)


def synthetic_batch(
    tables: Tables,
    dense_features: int,
    samples: int,
    distribution: Distribution,
    generator: torch.Generator,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return random synthetic samples in the format of a reader.

    Args:
        dense_features: D.
        samples: B.
        distribution: distribution of the ids, see :mod:`common.recommendation.tables`.
        generator: generator on the CPU.

    Returns:
        ``label`` (B,) and ``dense`` (B, D), float32; ``ids`` (B, L), int32.
    """
    made = {
        "label": torch.randint(2, (samples,), generator=generator).float(),
        "dense": 4 * torch.rand((samples, dense_features), generator=generator),
        "ids": synthetic_ids(tables, samples, distribution, generator),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}
