"""DLRM's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.dlrm.model import OPERATIONS
from common.config.ranges import NotNegative, Positive
from common.errors import ConfigError
from common.ops.operation import all_implementations
from common.recommendation.click_network import ClickArchitecture
from common.recommendation.config import ClickReader, EmbeddingSettings, criteo_tables
from common.recommendation.tables import Tables


@dataclass(frozen=True)
class Facts(ClickArchitecture):
    """What the rules fix beside the target: the dense network, the tables, and the shape of the decay.

    Attributes:
        table_rows: of each table, in the order of the features; a sample has one id of each.
        decay_power: of the learning rate's polynomial decay.
    """

    table_rows: tuple[int, ...]
    decay_power: Annotated[int, NotNegative]

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.tables

    @property
    def tables(self) -> Tables:
        """The embedding tables."""
        return criteo_tables(self.table_rows, (1,) * len(self.table_rows), self.width)


@dataclass(frozen=True)
class Hparams:
    """The tunable hyperparameters: the rows of the rules' table. SGD has neither momentum nor weight decay.

    Attributes:
        source: where the set was published.
        global_batch_size: samples of one optimizer step.
        optimizer: picks a table of log keys.
        base_learning_rate: what the warm-up heads for, of dense weights and rows alike.
        warmup_steps, decay_start_steps, decay_steps: see :func:`common.optim.learning_rate.held_polynomial`.
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
class DlrmConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    embeddings: EmbeddingSettings
    reader: ClickReader
