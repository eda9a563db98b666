"""Configuration dataclasses of R-GAT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.rgat.graph import Schema
from benchmarks.rgat.model import OPERATIONS, Architecture
from benchmarks.rgat.ops.sample.reference import SITES
from common.config.ranges import AtLeast, NotNegative, ShareAboveZero
from common.config.sections import NetworkConfig
from common.errors import ConfigError
from common.optim.hparams import AdamHparams


@dataclass(frozen=True)
class Facts(Architecture):
    """Constants that the rules fix: network, schema of the graph, sampling and split.

    Attributes:
        node_types: node types, in the order in which the preparation draws their permutations.
        relations: relations that are stored in files; their reverses are derived.
        seeds: node type that is classified.
        labelled: number of nodes of this type with a label; they are the first ones.
        train_share, eval_share: fractions of the labelled nodes; the rules fix the seed of the draw.
        fanouts: edges per relation that a node draws, from the seeds outwards.
    """

    node_types: tuple[str, ...]
    relations: tuple[str, ...]
    seeds: str
    labelled: Annotated[int, AtLeast(1)]
    train_share: Annotated[float, ShareAboveZero]
    eval_share: Annotated[float, ShareAboveZero]
    fanouts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.fanouts or not all(1 <= fanout <= SITES for fanout in self.fanouts):
            raise ConfigError(f"fanouts={list(self.fanouts)}: a number from 1 to {SITES} for each convolution")
        if self.train_share + self.eval_share > 1:
            raise ConfigError(f"eval_share={self.eval_share}: with train_share={self.train_share} more than all")
        try:
            _ = self.schema
        except ValueError as error:
            raise ConfigError(f"relations: {error}") from error

    @property
    def schema(self) -> Schema:
        """Types and relations that the network sees."""
        return Schema.augmented(self.node_types, self.relations, self.seeds)


@dataclass(frozen=True)
class Hparams(AdamHparams):
    """Tunable hyperparameters: the rows of the table in the rules."""

    optimizer: Literal["adam"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Recipe options that change results only by rounding.

    Attributes:
        example_papers: papers of the synthetic graph for warm-up and ``bench``; other node types in proportion.
    """

    operations = OPERATIONS
    example_papers: Annotated[int, AtLeast(1)]


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """Placement of the graph and its features, and capacities of sampled blocks.

    Attributes:
        features: placement of the feature rows: ``local``: in the memory of each GPU; ``peers``: sharded over the
            GPUs of a node, read in place; ``host``: in pinned memory of the node, read in place; ``exchange``:
            sharded over all ranks, fetched by collectives; ``auto``: chosen by number of ranks and free memory.
        graph: ``local``: each GPU has all edges; ``peers``: sharded over the GPUs of a node; ``auto``: chosen by free
            memory.
        eval_batch: seeds of an evaluation batch of one rank.
        capacity_batches: batches sampled to estimate the size of a block.
        capacity_sigma: capacity of a captured batch: mean plus this many standard deviations.
    """

    features: Literal["auto", "local", "peers", "host", "exchange"]
    graph: Literal["auto", "local", "peers"]
    eval_batch: Annotated[int, AtLeast(1)]
    capacity_batches: Annotated[int, AtLeast(2)]
    capacity_sigma: Annotated[float, NotNegative]


@dataclass(frozen=True)
class RgatConfig:
    """R-GAT's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
