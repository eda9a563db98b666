"""Data types of the workload contract: blocks, batches and data sources."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # code that only reads a schedule does not need PyTorch
    from torch import Tensor


@dataclass(frozen=True)
class Block:
    """The training samples between two consecutive evaluation points of the rules.

    Attributes:
        index: number of the block, from 0.
        first_epoch: epoch in which the block starts, counted from 1.
        epochs: number of epochs in the block; 0 if the benchmark counts samples.
        start_sample: training samples before the block, over all ranks.
        samples: nominal training samples in the block, over all ranks. 0 for a generation of self-play, whose samples
            are known only when its games have been played; then ``start_sample`` is 0 too.
    """

    index: int
    first_epoch: int
    epochs: int
    start_sample: int
    samples: int


@dataclass(frozen=True)
class Batch:
    """The tensors of one micro-batch of one rank, on the training device.

    Attributes:
        tensors: name to tensor; the shapes are fixed for a given ``key``.
        samples: nominal samples over all ranks, as the rules count them.
        key: selects the captured graph; known on the host without a synchronisation.
    """

    tensors: dict[str, Tensor]
    samples: int
    key: Hashable = ()


@dataclass(frozen=True)
class HostBatch:
    """One micro-batch from a reader: in pinned host memory, or already on the device.

    Attributes:
        position: number of micro-batches of the block before this one; a checkpoint stores it.
    """

    tensors: dict[str, Tensor]
    samples: int
    position: int
    key: Hashable = ()


class DataSource(Protocol):
    """Training data of one rank. Opened after ``run_start``."""

    train_samples: int
    eval_samples: int
    synthetic: bool

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield this rank's micro-batches of ``block``, from position ``start`` to the end of the block."""
        ...

    def close(self) -> None:
        """Stop worker threads and processes and close files."""
        ...


@runtime_checkable
class ReorderingSource(DataSource, Protocol):
    """Training data whose order depends on the times of the samples, so a checkpoint stores what was late."""

    def late(self, taken: int) -> list[int]:
        """Return the numbers of this rank's micro-batches that were late after ``taken`` ones of the whole training."""
        ...

    def resume(self, late: Sequence[int]) -> None:
        """Begin with the micro-batches that were late when a checkpoint was written, before those that follow."""
        ...


PLAY_SECONDS = 1.0
"""Time for which a rank plays before it looks for finished games or for the end of self-play, in seconds."""


class Player(Protocol):
    """Plays games with the device of this rank, and writes them."""

    def play(self, seconds: float) -> bool:
        """Play for ``seconds``. Return True if every worker has sent a request since the last True."""
        ...

    def measures(self) -> Mapping[str, float | str]:
        """Return measures of self-play on this rank since the last call, by name; empty if it has not played."""
        ...

    def close(self) -> None:
        """End self-play on this rank."""
        ...


@runtime_checkable
class GenerationSource(DataSource, Protocol):
    """Training data from self-play: the data of a block, a generation, depend on the weights before it.

    :meth:`batches` waits for the games of the block. It raises Interrupted on all training ranks if rank 0 is asked to
    stop meanwhile.
    """

    def watch(self, progress: Callable[[], None], stopping: Callable[[], bool]) -> None:
        """Set two callbacks that a wait for games uses.

        Args:
            progress: called while self-play works.
            stopping: returns whether the wait shall end.
        """
        ...

    def trained(self, block: Block, weights: Mapping[str, Tensor]) -> None:
        """Save the weights after ``block``, which play the games of the next generation. Collective.

        Returns when they are saved; this time counts for ``run_stop``.
        """
        ...

    def games(self, block: Block) -> Sequence[int]:
        """Return the numbers of games in each generation that ``block`` was trained on, the newest last."""
        ...

    def measures(self) -> Mapping[str, float | str]:
        """See :meth:`Player.measures`."""
        ...


def late_of(source: DataSource, taken: int) -> list[int] | None:
    """Return :meth:`ReorderingSource.late` of the source; None if its order does not depend on times."""
    return source.late(taken) if isinstance(source, ReorderingSource) else None


class EvalSource(Protocol):
    """Evaluation data of one replica; each evaluation iterates over it once.

    Every replica yields ``len(source)`` batches; those of one key have one shape. Over all replicas, each sample of the
    evaluation set occurs once; the rest is padding.
    """

    eval_samples: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[HostBatch]: ...

    def close(self) -> None:
        """Stop threads and close files."""
        ...
