"""The data side of the contract: blocks, batches, and where they come from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # who reads a schedule needs no PyTorch
    from torch import Tensor


@dataclass(frozen=True)
class Block:
    """The training samples between two evaluation points of the rules.

    Attributes:
        index: number of the block, from 0.
        first_epoch: epoch that the block starts in, counted from 1.
        epochs: epochs in the block; 0 when the benchmark counts samples.
        start_sample: training samples before the block, over all ranks.
        samples: nominal training samples in the block, over all ranks.
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
        samples: nominal samples over all ranks, what the rules count.
        key: picks the captured graph; known on the host without a synchronisation.
    """

    tensors: dict[str, Tensor]
    samples: int
    key: Hashable = ()


@dataclass(frozen=True)
class HostBatch:
    """One micro-batch as a reader delivers it: in pinned host memory, or already on the device.

    ``position`` is the number of micro-batches of the block that were delivered before this one, so that a
    checkpoint can hold a position.
    """

    tensors: dict[str, Tensor]
    samples: int
    position: int
    key: Hashable = ()


class DataSource(Protocol):
    """Training data of one rank. Opened after ``run_start``."""

    train_samples: int
    eval_samples: int
    stand_in: bool

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield this rank's micro-batches of ``block`` from position ``start`` until its data end."""
        ...

    def close(self) -> None:
        """Stop worker threads and processes and close files."""
        ...


class EvalSource(Protocol):
    """Evaluation data of one replica: iterate once per evaluation.

    Every replica yields ``len(source)`` batches of the same shape; their real samples together are the evaluation set,
    each once, the others padding.
    """

    eval_samples: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[HostBatch]: ...

    def close(self) -> None:
        """Stop threads and close files."""
        ...
