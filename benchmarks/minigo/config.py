"""Configuration of MiniGo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from benchmarks.minigo.evaluate import evaluation_settings
from benchmarks.minigo.model import OPERATIONS, MiniGoArchitecture
from benchmarks.minigo.records import Sampling
from benchmarks.minigo.search import SearchSettings
from common.config.ranges import Ascending, AtLeast, Decay, Each, NotNegative, Positive, ShareAboveZero
from common.config.schema import Precision
from common.config.sections import NetworkConfig
from common.errors import ConfigError
from common.optim.learning_rate import Schedule, stepwise
from common.optim.momentum import SGD


@dataclass(frozen=True)
class Facts:
    """Constants of the rules, except target and number of evaluation games.

    Attributes:
        blocks, width, value_hidden: sizes of the network; see :class:`benchmarks.minigo.model.MiniGoArchitecture`.
        search: board, rules and search of self-play.
        evaluation_readouts: visits per move in evaluation games.
        games: games that each generation plays at least, and that training draws from each generation.
        window: number of generations that training draws examples from, the newest ones.
        keep: probability that training draws a record of a drawn game.
    """

    blocks: Annotated[int, AtLeast(1)]
    width: Annotated[int, AtLeast(1)]
    value_hidden: Annotated[int, AtLeast(1)]
    search: SearchSettings
    evaluation_readouts: Annotated[int, AtLeast(2)]
    games: Annotated[int, AtLeast(1)]
    window: Annotated[int, AtLeast(1)]
    keep: Annotated[float, ShareAboveZero]

    @property
    def architecture(self) -> MiniGoArchitecture:
        """Sizes of the network."""
        return MiniGoArchitecture(self.search.board, self.blocks, self.width, self.value_hidden)

    @property
    def sampling(self) -> Sampling:
        """How training draws examples."""
        return Sampling(self.window, self.games, self.keep)

    @property
    def shortest_search(self) -> SearchSettings:
        """The search of self-play with the fewest readouts, for a warm-up."""
        return replace(self.search, readouts=2, fast_readouts=2)

    @property
    def evaluation(self) -> SearchSettings:
        """Rules and search of evaluation games."""
        return evaluation_settings(self.search, self.evaluation_readouts)


@dataclass(frozen=True)
class Hparams:
    """Tunable hyperparameters: batch, learning rates and their boundaries.

    Attributes:
        source: publication of the set.
        global_batch_size: examples per optimizer step.
        lr_rates: learning rates, one more than ``lr_boundaries``.
        lr_boundaries: last optimizer step, counted from 0, of each rate but the last.
        weight_decay: factor of half the sum of squares of :func:`benchmarks.minigo.model.decayed` weights in the loss.
    """

    source: str
    optimizer: Literal["sgd"]
    global_batch_size: int
    lr_rates: Annotated[tuple[float, ...], Each(Positive)]
    lr_boundaries: Annotated[tuple[int, ...], Ascending("steps")]
    momentum: Annotated[float, Decay]
    weight_decay: Annotated[float, NotNegative]

    def sgd(self) -> SGD:
        """Return the update rule."""
        return SGD(self.momentum)

    def schedule(self) -> Schedule:
        """Return the learning rate as a function of the optimizer step, which counts over all generations of a run.

        As in TensorFlow's ``piecewise_constant``, a boundary is the last step of a rate.
        """
        starts = [0, *(boundary + 1 for boundary in self.lr_boundaries)]
        return stepwise(1.0, 1.0, 0, starts, self.lr_rates, steps_per_epoch=1)

    def __post_init__(self) -> None:
        if len(self.lr_rates) != len(self.lr_boundaries) + 1:
            raise ConfigError(
                f"lr_rates={list(self.lr_rates)}: one rate more than lr_boundaries={list(self.lr_boundaries)}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Implementations of the operations."""

    operations = OPERATIONS


@dataclass(frozen=True)
class PlayerConfig:
    """Self-play and evaluation games on one rank.

    Attributes:
        workers: processes that search.
        concurrent: games in each of the two groups that a worker alternates between.
        shard_games: games in a file.
        cache_mb: MiB of each worker for answers of the network (:mod:`benchmarks.minigo.cache`); 0 for no cache.
        precision: precision of the network in self-play.
        evaluation_precision: precision of the network in evaluation games.
    """

    workers: Annotated[int, AtLeast(1)]
    concurrent: Annotated[int, AtLeast(1)]
    shard_games: Annotated[int, AtLeast(1)]
    cache_mb: Annotated[int, AtLeast(0)]
    precision: Precision
    evaluation_precision: Precision


@dataclass(frozen=True)
class MiniGoConfig:
    """MiniGo's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    player: PlayerConfig
