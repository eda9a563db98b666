"""Configuration dataclasses of DLRM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.dlrm.model import OPERATIONS
from common.config.ranges import NotNegative, Positive
from common.config.sections import NetworkConfig
from common.errors import ConfigError
from common.recommendation.click_network import ClickArchitecture
from common.recommendation.config import ClickReader, EmbeddingSettings, criteo_tables
from common.recommendation.tables import Tables


@dataclass(frozen=True)
class Facts(ClickArchitecture):
    """Dataset and model constants that the rules fix: dense network, embedding tables and shape of the decay.

    Attributes:
        table_rows: rows of each table, in the order of the features; a sample has one id per table.
        decay_power: exponent of the polynomial decay of the learning rate.
    """

    table_rows: tuple[int, ...]
    decay_power: Annotated[int, NotNegative]

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.tables

    @property
    def tables(self) -> Tables:
        """Embedding tables."""
        return criteo_tables(self.table_rows, (1,) * len(self.table_rows), self.width)


@dataclass(frozen=True)
class Hparams:
    """Tunable hyperparameters: the rows of the table in the rules. SGD has neither momentum nor weight decay.

    Attributes:
        source: publication of this set of hyperparameters.
        global_batch_size: samples per optimizer step.
        optimizer: name that selects the optimizer's log keys.
        base_learning_rate: learning rate after warm-up, for dense weights and embedding rows.
    """

    source: str
    global_batch_size: int
    optimizer: Literal["sgd"]
    base_learning_rate: Annotated[float, Positive]
    warmup_steps: Annotated[int, NotNegative]
    decay_start_steps: Annotated[int, NotNegative]
    decay_steps: Annotated[int, NotNegative]

    def __post_init__(self) -> None:
        if self.decay_steps and self.decay_start_steps < self.warmup_steps:
            raise ConfigError(
                f"decay_start_steps={self.decay_start_steps}: not before the end of warmup_steps={self.warmup_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Recipe options that change results only by rounding. The loss scale is constant."""

    operations = OPERATIONS


@dataclass(frozen=True)
class DlrmConfig:
    """DLRM's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    embeddings: EmbeddingSettings
    reader: ClickReader
