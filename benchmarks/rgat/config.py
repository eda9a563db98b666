"""R-GAT's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.rgat.model import OPERATIONS, Architecture
from benchmarks.rgat.ops.sample.sampler import SITES
from benchmarks.rgat.schema import Schema
from common.config.ranges import AtLeast, NotNegative, Positive, ShareAboveZero
from common.errors import ConfigError
from common.ops.operation import all_implementations
from common.optim.hparams import AdamHparams


@dataclass(frozen=True)
class Facts(Architecture):
    """What the rules fix beside the target: the network, the graph's schema, how it is sampled, and the split.

    Attributes:
        node_types: in the order in which the preparation permutes them.
        relations: those stored in files; reversed ones follow from them.
        seeds: the type that is classified.
        labelled: nodes of that type that have a label, the first ones.
        train_share, eval_share: of the labelled nodes, drawn by the rules' seed.
        fanouts: edges of each relation that a node draws, from the seeds outwards.
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
        """The types and relations that the network sees."""
        return Schema.augmented(self.node_types, self.relations, self.seeds)


@dataclass(frozen=True)
class Hparams(AdamHparams):
    """The tunable hyperparameters: the rows of the rules' table."""

    optimizer: Literal["adam"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The choices of a recipe that change no result but by rounding.

    Attributes:
        loss_scale: first loss scale; only fp16 has one.
        example_papers: seeds of the graph that is made up for warm-up and ``bench``; the other nodes in proportion.
        implementations: name of an operation to the implementation that runs it; ``auto`` for those left out.
    """

    loss_scale: Annotated[float, Positive]
    example_papers: Annotated[int, AtLeast(1)]
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """Where the graph lies and how blocks are sampled from it.

    Attributes:
        features: where the rows of all nodes lie: ``local``: in each GPU's own memory; ``peers``: over the GPUs of a
            node, read in place; ``host``: in pinned memory of the node, read in place; ``exchange``: over all ranks,
            fetched by collectives; ``auto``: one of these, by ranks and room.
        graph: ``local``: each GPU has all edges; ``peers``: over the GPUs of a node; ``auto``: the first with room.
        eval_batch: seeds of an evaluation batch of one rank.
        capacity_batches: batches that are sampled to find out how large one becomes.
        capacity_sigma: room of a captured batch: mean plus so many standard deviations of these.
    """

    features: Literal["auto", "local", "peers", "host", "exchange"]
    graph: Literal["auto", "local", "peers"]
    eval_batch: Annotated[int, AtLeast(1)]
    capacity_batches: Annotated[int, AtLeast(2)]
    capacity_sigma: Annotated[float, NotNegative]


@dataclass(frozen=True)
class RgatConfig:
    """All of it."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: ReaderConfig
