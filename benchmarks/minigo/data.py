"""Training data from self-play: the games of a generation, and the micro-batches that are drawn from them.

Training on generation n waits until its games have been played. Meanwhile this rank's device evaluates the leaves of
its self-play workers; while it trains, they wait. Then the examples are drawn (:mod:`benchmarks.minigo.records`), and
after the last step the weights are saved as the model of generation n + 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.minigo.models import Models
from benchmarks.minigo.records import Examples, Games, Sampling, draw
from common.data.batches import PLAY_SECONDS, Block, HostBatch, Player
from common.data.order import MicroBatches
from common.data.threads import read_groups
from common.distributed import job_store
from common.errors import DataError, Interrupted

FORMAT = "minigo-bootstrap/1"
"""Name and version of the prepared data's format."""
PREPARE_COMMAND = "mlperf-suite prepare benchmark=minigo --raw-dir RAW --data-dir DATA"
BOOTSTRAP = "games"
"""Folder of the prepared data with a folder of games for each generation of the first window."""
START = "start.safetensors"
"""File of the assets with the weights from which training starts."""
READ_AHEAD = 16
"""Micro-batches that a thread reads from the files of games at once, in their order in these files."""


class Spectator:
    """Player of a training rank on which no games are played, because other ranks play them."""

    def play(self, seconds: float) -> bool:
        """Wait for ``seconds``. Ranks that play watch their own progress."""
        time.sleep(seconds)
        return True

    def measures(self) -> dict[str, float | str]:
        """Return no measures."""
        return {}

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class SelfPlayParts:
    """The parts of self-play, which all ranks of a run share, except the player.

    Attributes:
        player: plays on this rank.
        first: generation that the first block is trained on. Its model exists, and earlier generations have games.
    """

    games: Games
    models: Models
    player: Player
    sampling: Sampling
    first: int


class SelfPlaySource:
    """Training micro-batches of one replica; a :class:`common.data.batches.GenerationSource`.

    Args:
        mine: size and position of this replica's micro-batches.
        seed: seed of the examples and their order, equal on all ranks.
        pin_memory: whether batches are in pinned memory.
        train_samples, eval_samples, synthetic: properties of the prepared data from which self-play begins.
    """

    def __init__(
        self,
        self_play: SelfPlayParts,
        mine: MicroBatches,
        seed: int,
        pin_memory: bool,
        train_samples: int,
        eval_samples: int,
        synthetic: bool,
    ) -> None:
        self.train_samples, self.eval_samples, self.synthetic = train_samples, eval_samples, synthetic
        self._play, self._mine, self._seed, self._pin = self_play, mine, seed, pin_memory
        self._progress: Callable[[], object] = lambda: None
        self._stopping: Callable[[], bool] = lambda: False

    def watch(self, progress: Callable[[], None], stopping: Callable[[], bool]) -> None:
        """See :class:`common.data.batches.GenerationSource`."""
        self._progress, self._stopping = progress, stopping

    def generation(self, block: Block) -> int:
        """Return the generation whose games are the newest that ``block`` is trained on."""
        return self._play.first + block.index

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Play until the games of ``block`` are complete; then yield its micro-batches from position ``start``.

        Raises:
            DataError: the games have too few records for one step, or a file of games is damaged.
            Interrupted: rank 0 is asked to stop while it waits for games.
        """
        generation, mine = self.generation(block), self._mine
        self._complete(generation)
        sample = draw(self._play.games, self._play.sampling, self._seed, generation)
        steps = sample.steps(mine.micro_batch * mine.streams)
        if not steps:
            raise DataError(
                f"generation {generation} has {len(sample)} examples, fewer than the global batch of "
                f"{mine.micro_batch * mine.streams}: use a smaller batch or more games"
            )
        end = steps * mine.accumulation
        pieces = [range(first, min(first + READ_AHEAD, end)) for first in range(start, end, READ_AHEAD)]

        def read(numbers: range) -> Examples:
            begins = [mine.global_index(number) * mine.micro_batch for number in numbers]
            return sample.read(np.concatenate([np.arange(begin, begin + mine.micro_batch) for begin in begins]))

        for ((numbers, examples),) in read_groups(pieces, read, threads=1, size=1):
            for index, number in enumerate(numbers):
                rows = slice(index * mine.micro_batch, (index + 1) * mine.micro_batch)
                yield HostBatch(self._tensors(examples, rows), mine.micro_batch * mine.replicas, number)

    def trained(self, block: Block, weights: Mapping[str, Tensor]) -> None:
        """Save ``weights`` as the model of the next generation; see :class:`common.data.batches.GenerationSource`.

        Raises:
            CheckpointError: the model cannot be written.
        """
        following = self.generation(block) + 1
        if self._mine.replica == 0:
            self._play.models.publish(following, weights)
        job_store.from_rank_0(f"model of generation {following}", "saved")
        # `games` still reads the window of this block.
        self._play.games.forget_before(self._play.sampling.generations(self.generation(block)).start)

    def games(self, block: Block) -> list[int]:
        """Return the numbers of games in each generation that ``block`` was trained on, the newest last."""
        return [self._play.games.count(number) for number in self._play.sampling.generations(self.generation(block))]

    def measures(self) -> Mapping[str, float | str]:
        """Return measures of self-play on this rank since the last call."""
        return self._play.player.measures()

    def close(self) -> None:
        """End self-play."""
        self._play.player.close()

    def _complete(self, generation: int) -> None:
        """Play until ``generation`` has all its games, which are the same ones on all ranks."""
        games, needed, name = self._play.games, self._play.sampling.games, f"games of generation {generation}"

        def play() -> int:
            if self._play.player.play(PLAY_SECONDS):
                self._progress()
            return games.count(generation)  # checks the files that have appeared, so that none is left for later

        self._progress()
        if self._mine.replica == 0 or not job_store.joined():
            count = games.count(generation)
            while count < needed and not self._stopping():
                count = play()
            names = json.dumps(games.close(generation) if count >= needed else None)
            names = job_store.from_rank_0(name, names)
        else:
            names = job_store.from_rank_0(name, "", meanwhile=play)
        if (closed := json.loads(names)) is None:
            raise Interrupted(f"stopped while the games of generation {generation} were played")
        games.adopt(generation, closed)

    def _tensors(self, read: Examples, rows: slice) -> dict[str, Tensor]:
        arrays: dict[str, NDArray[Any]] = {
            "bits": read.bits_RK,
            "pi": read.pi_RA,
            "outcome": read.outcome_R,
            "symmetry": read.symmetry_R,
        }
        tensors = {name: torch.from_numpy(array[rows]) for name, array in arrays.items()}
        return {name: tensor.pin_memory() if self._pin else tensor for name, tensor in tensors.items()}
