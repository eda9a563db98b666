"""Configuration dataclasses of DLRM-DCNv2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.dlrm_dcnv2.model import OPERATIONS, DlrmDcnv2Architecture
from common.config.sections import NetworkConfig
from common.optim.hparams import AdagradHparams
from common.recommendation.config import ClickReader, EmbeddingSettings, criteo_tables
from common.recommendation.tables import Tables


@dataclass(frozen=True)
class Facts(DlrmDcnv2Architecture):
    """Dataset and model constants that the rules fix: dense network and embedding tables.

    Attributes:
        table_rows: rows of each table, in the order of the features.
        hotness: ids per sample, for each table.
    """

    table_rows: tuple[int, ...]
    hotness: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.tables

    @property
    def tables(self) -> Tables:
        """Embedding tables."""
        return criteo_tables(self.table_rows, self.hotness, self.width)


@dataclass(frozen=True)
class Hparams(AdagradHparams):
    """Tunable hyperparameters: the rows of the table in the rules that are not fixed."""

    optimizer: Literal["adagrad"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Recipe options that change results only by rounding. The loss scale is constant."""

    operations = OPERATIONS


@dataclass(frozen=True)
class DlrmDcnv2Config:
    """DLRM-DCNv2's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    embeddings: EmbeddingSettings
    reader: ClickReader
