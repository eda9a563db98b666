"""Configuration sections that the recommendation workloads share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from common.config.ranges import AtLeast
from common.errors import ConfigError
from common.recommendation.criteo.row_reader import RowReaderSettings
from common.recommendation.criteo.sample_rows import CATEGORICAL
from common.recommendation.planner import PlannerSettings
from common.recommendation.tables import Distribution, Table, Tables


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings(PlannerSettings):
    """Placement, lookup and update of the tables; apart from rounding, it does not change results.

    Attributes:
        plan: ``auto``, ``balanced``, ``hier_auto``, ``table_wise``, ``row_wise`` or the path of a plan
            (:func:`common.recommendation.planner.make_plan`).
        rows: dtype of the rows; fp16 rows use stochastic rounding. The optimizer state is fp32.
        overlap: look up, sort and exchange gradients concurrently with the dense network.
        exchange: how ids, vectors and gradients move in training: ``collectives``, or between the GPUs of one machine,
            if these can map each other's memory, ``peer_memory``. Evaluation uses collectives.
        example_ids: distribution of the ids of synthetic samples for warm-up and ``bench``: ``uniform``, or skewed,
            ``zipf``.
    """

    plan: str = "auto"
    rows: Literal["fp32", "fp16"] = "fp32"
    overlap: bool = True
    exchange: Literal["collectives", "peer_memory"] = "collectives"
    example_ids: Distribution = "uniform"


@dataclass(frozen=True, kw_only=True)
class ClickReader(RowReaderSettings):
    """Options for reading the prepared samples.

    Attributes:
        eval_batch: samples of an evaluation batch of one rank.
    """

    eval_batch: Annotated[int, AtLeast(1)]


def criteo_tables(rows: Sequence[int], hotness: Sequence[int], width: int) -> Tables:
    """Return the tables of Criteo's categorical features, C1 to C26.

    Args:
        rows: number of rows of each table.
        hotness: number of ids per sample in each table.

    Raises:
        ConfigError: there are not 26 of each, or a number is out of range.
    """
    for name, values in (("table_rows", rows), ("hotness", hotness)):
        if len(values) != CATEGORICAL:
            raise ConfigError(f"{name}: {len(values)} tables, Criteo's samples have {CATEGORICAL} categorical features")
    try:
        made = [Table(f"C{n}", *sizes) for n, sizes in enumerate(zip(rows, hotness, strict=True), 1)]
        return Tables(tuple(made), width)
    except ValueError as error:
        raise ConfigError(f"table_rows: {error}") from error
