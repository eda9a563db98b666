"""DLRM-DCNv2's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.dlrm_dcnv2.model import OPERATIONS, Architecture
from common.config.ranges import Positive
from common.ops.operation import all_implementations
from common.optim.hparams import AdagradHparams
from common.recommendation.config import ClickReader, EmbeddingSettings, criteo_tables
from common.recommendation.tables import Tables


@dataclass(frozen=True)
class Facts(Architecture):
    """What the rules fix beside the target: the dense network and the tables.

    Attributes:
        table_rows: of each table, in the order of the features.
        hotness: of each table, ids of a sample.
    """

    table_rows: tuple[int, ...]
    hotness: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.tables

    @property
    def tables(self) -> Tables:
        """The embedding tables."""
        return criteo_tables(self.table_rows, self.hotness, self.width)


@dataclass(frozen=True)
class Hparams(AdagradHparams):
    """The tunable hyperparameters: the rows of the rules' table that are not fixed."""

    optimizer: Literal["adagrad"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The choices of a recipe that change no result but by rounding.

    Attributes:
        loss_scale: constant; only fp16 has one.
        implementations: name of an operation to the implementation that runs it; ``auto`` for those left out.
    """

    loss_scale: Annotated[float, Positive]
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))


@dataclass(frozen=True)
class DlrmDcnv2Config:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    embeddings: EmbeddingSettings
    reader: ClickReader
