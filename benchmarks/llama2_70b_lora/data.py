"""Prepared rows to the tensors of a micro-batch.

``tokens`` (rows, length) int32; ``labels`` (rows, length) int32, the next token at each position and -1 where nothing
is scored, which is always so at a row's last position; in training ``dropout_seed``, int64 without a dimension, in
evaluation ``present`` (rows,) bool, False for rows that only fill a batch up. Under context parallelism a rank has some
columns of every row; the shift comes before they are taken, so a label may be a token of another rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.llama2_70b_lora.rows import PreparedRows, RowFacts, open_rows
from common.data.batches import Block, HostBatch
from common.data.order import EpochStream, EvalShard, MicroBatches
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.cross_entropy import NOT_SCORED


class TrainRows:
    """Training micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    A row is 32 KiB of a mapped file, so nothing is read ahead.

    Args:
        rows: the prepared folder.
        mine: this replica's micro-batches.
        seed: of order and dropout.
        columns: places in a row that this rank has; None for all.
        pin_memory: of the tensors.
    """

    def __init__(
        self, rows: PreparedRows, mine: MicroBatches, seed: int, columns: NDArray[np.int64] | None, pin_memory: bool
    ) -> None:
        self.train_samples, self.eval_samples = len(rows.train), len(rows.eval)
        self.stand_in = rows.stand_in
        self._rows, self._mine, self._seed = rows, mine, seed
        self._columns, self._pin_memory = columns, pin_memory
        shares = (mine.micro_batch, mine.accumulation, mine.replicas, mine.replica)
        self._stream = EpochStream(self.train_samples, *shares, seed)

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``."""
        first, nominal = self._mine.first(block), self._mine.micro_batch * self._mine.replicas
        for position in range(start, self._stream.micro_batches(block)):
            numbers = [row for _, row in self._stream.samples(block, position)]
            tensors = shifted(self._rows.train[numbers], None, self._columns, self._pin_memory)
            seed = torch.tensor(self._mine.random_seed(self._seed, first + position), dtype=torch.int64)
            tensors["dropout_seed"] = seed.pin_memory() if self._pin_memory else seed
            yield HostBatch(tensors, nominal, position)

    def close(self) -> None:
        """Nothing runs in the background."""


class EvaluationRows:
    """This replica's evaluation batches; a :class:`common.data.batches.EvalSource`.

    Args:
        rows: the prepared folder.
        shard: this replica's rows; every replica has as many batches as the others.
        columns, pin_memory: see :class:`TrainRows`.
    """

    def __init__(
        self, rows: PreparedRows, shard: EvalShard, columns: NDArray[np.int64] | None, pin_memory: bool
    ) -> None:
        self.eval_samples = shard.eval_samples
        self._rows, self._shard = rows, shard
        self._columns, self._pin_memory = columns, pin_memory

    def __len__(self) -> int:
        return self._shard.batches

    def __iter__(self) -> Iterator[HostBatch]:
        """Yield the batches of one evaluation."""
        for number in range(self._shard.batches):
            yield HostBatch(self._tensors(number), self._shard.batch * self._shard.replicas, number)

    def close(self) -> None:
        """Nothing runs in the background."""

    def _tensors(self, number: int) -> dict[str, Tensor]:
        real = self._shard.samples(number)
        shape = (self._shard.batch, self._rows.eval.shape[1])
        tokens_RS, scored_RS = np.zeros(shape, np.int32), np.zeros(shape, np.uint8)
        tokens_RS[: len(real)] = self._rows.eval[real.start : real.stop]
        scored_RS[: len(real)] = self._rows.eval_scored[real.start : real.stop]
        tensors = shifted(tokens_RS, scored_RS, self._columns, self._pin_memory)
        present = torch.from_numpy(np.arange(self._shard.batch) < len(real))
        tensors["present"] = present.pin_memory() if self._pin_memory else present
        return tensors


def open_train(
    root: Path,
    facts: RowFacts,
    layout: Layout,
    micro_batch: int,
    accumulation: int = 1,
    seed: int | None = None,
    positions: Tensor | None = None,
) -> TrainRows:
    """Open the training data under ``root`` for this rank; after ``run_start``.

    Args:
        root: prepared data.
        facts: what the rows have to be like.
        layout: the replica (axis dp), the device, and the seed.
        micro_batch: rows of a micro-batch of one replica.
        accumulation: micro-batches per step of a replica.
        seed: of order and dropout; None for the layout's.
        positions: int64, the places in a row that this rank has, in its order; None for all.

    Raises:
        DataError: the folder is incomplete or damaged, or its rows are for another model.
    """
    mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    chosen = layout.seed if seed is None else seed
    return TrainRows(open_rows(root, facts), mine, chosen, _columns(positions), layout.device.type == "cuda")


def open_evaluation(
    root: Path, facts: RowFacts, layout: Layout, rows_per_batch: int = 1, positions: Tensor | None = None
) -> EvaluationRows:
    """Open this replica's contiguous part of the evaluation set under ``root``; after ``run_start``.

    Args:
        root, facts, positions: see :func:`open_train`.
        layout: the replicas that share the set (axis dp), and the device.
        rows_per_batch: rows of every batch; the last ones are filled up.

    Raises:
        DataError: see there.
    """
    rows = open_rows(root, facts)
    shard = EvalShard(len(rows.eval), rows_per_batch, layout.size("dp"), layout.index("dp"))
    return EvaluationRows(rows, shard, _columns(positions), layout.device.type == "cuda")


def shifted(
    tokens_RS: NDArray[np.int32],
    scored_RS: NDArray[np.uint8] | None,
    columns: NDArray[np.int64] | None = None,
    pin_memory: bool = False,
) -> dict[str, Tensor]:
    """``tokens`` and ``labels`` of whole rows, or of some of their columns.

    Args:
        tokens_RS: rows of tokens.
        scored_RS: not 0 where the loss asks for the token itself; None where it asks for all.
        columns: places in a row, in the order in which they are wanted; None for all.
        pin_memory: for a copy to a GPU that does not wait.
    """
    labels_RS = np.full_like(tokens_RS, NOT_SCORED)
    labels_RS[:, :-1] = tokens_RS[:, 1:]
    if scored_RS is not None:
        labels_RS[:, :-1][scored_RS[:, 1:] == 0] = NOT_SCORED
    made = {"tokens": tokens_RS, "labels": labels_RS}
    if columns is not None:
        made = {name: array[:, columns] for name, array in made.items()}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in made.items()}
    return {name: tensor.pin_memory() if pin_memory else tensor for name, tensor in tensors.items()}


def example(rows: int, facts: RowFacts, columns: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    """A made-up training micro-batch, in host memory: any tokens, all scored.

    Args:
        rows: of the micro-batch.
        facts: their length and the vocabulary.
        columns: of a row that a rank has; None for all.
        seed: of the tokens.
    """
    shape = (rows, facts.row_length if columns is None else columns)
    tokens_RS = np.random.default_rng(seed).integers(0, facts.vocabulary, shape, dtype=np.int32)
    return {**shifted(tokens_RS, None), "dropout_seed": torch.tensor(seed, dtype=torch.int64)}


def _columns(positions: Tensor | None) -> NDArray[np.int64] | None:
    return None if positions is None else positions.cpu().numpy()
