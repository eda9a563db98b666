"""Prepared format, and its conversion to the tensors of a micro-batch.

The format is memory-mapped numpy files: ``train_tokens.npy`` and ``eval_tokens.npy`` are int32 (rows, row length).
``eval_scored.npy`` is uint8 of the same shape, with 1 for tokens that are scored; training scores all tokens.
``manifest.json`` has the numbers of rows and of scored tokens, the row length, and the vocabulary size.

A micro-batch has the tensors

- ``tokens`` (rows, length) int32
- ``labels`` (rows, length) int32: the next token at each position; -1 where not scored, and always at the last position
- ``dropout_seed``, 0-d int64, in training
- ``present`` (rows,) bool, in evaluation: False for rows that only pad a batch

Under context parallelism, a rank has some columns of every row. Labels are shifted before columns are selected, so a
label may be a token of another rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data import manifest
from common.data.batches import Block, HostBatch
from common.data.manifest import Manifest
from common.data.order import EpochStream, EvalShard, MicroBatches
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.vocabulary import NOT_SCORED
from common.errors import DataError
from common.formats import npy

FORMAT = "llama2-rows/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=llama2_70b_lora --raw-dir RAW --data-dir DATA"
TOKENS = {"train": "train_tokens.npy", "eval": "eval_tokens.npy"}
SCORED = "eval_scored.npy"
SIZES = ("train_samples", "eval_samples", "row_length", "vocabulary")
"""Sizes that every manifest has; the last two must be equal to those of the model."""


class RowSizes(Protocol):
    """Required sizes of the rows."""

    @property
    def row_length(self) -> int:
        """Tokens per row."""
        ...

    @property
    def vocabulary(self) -> int:
        """Vocabulary size of the model."""
        ...


@dataclass(frozen=True)
class PreparedRows:
    """Rows of a prepared folder.

    Attributes:
        train: training tokens, (R, S): rows of S tokens.
        eval: evaluation tokens, (R, S).
        eval_scored: (R, S), 1 for evaluation tokens that are scored.
        synthetic: whether the data are synthetic.
    """

    train: NDArray[np.int32]
    eval: NDArray[np.int32]
    eval_scored: NDArray[np.uint8]
    synthetic: bool


def open_rows(root: Path, facts: RowSizes) -> PreparedRows:
    """Map the rows of a prepared folder into memory.

    Raises:
        DataError: the folder is incomplete or damaged, or its rows are for another model.
    """
    found = read_manifest(root, facts)
    length = facts.row_length
    train, evaluation = ((found.counts[f"{split}_samples"], length) for split in TOKENS)
    return PreparedRows(
        _mapped(root / TOKENS["train"], np.int32, train),
        _mapped(root / TOKENS["eval"], np.int32, evaluation),
        _mapped(root / SCORED, np.uint8, evaluation),
        found.synthetic,
    )


def read_manifest(root: Path, facts: RowSizes) -> Manifest:
    """Read the manifest of ``root`` and check it against ``facts``.

    Raises:
        DataError: the manifest is missing, damaged, of another format, or belongs to data for another model.
    """
    found = manifest.read(root, FORMAT, PREPARE_COMMAND, SIZES)
    for name in ("row_length", "vocabulary"):
        if found.counts[name] != getattr(facts, name):
            raise DataError(
                f"{root} has {name} {found.counts[name]} where the model has {getattr(facts, name)}: it is another "
                "data set than benchmark.facts is for; give the data_dir that belongs to this recipe"
            )
    for name in (*TOKENS.values(), SCORED):
        if name not in found.files:
            raise DataError(f"{root / manifest.NAME} names no {name}; run '{PREPARE_COMMAND}'")
    return found


def _mapped(path: Path, dtype: type, shape: tuple[int, int]) -> NDArray[Any]:
    remedy = f"run 'mlperf-suite verify benchmark=llama2_70b_lora --data-dir {path.parent}'"
    try:
        array: NDArray[Any] = npy.mapped(path)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); {remedy}") from error
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise DataError(
            f"{path} holds {array.dtype} of shape {array.shape} where {manifest.NAME} says {np.dtype(dtype)} of "
            f"{shape}; {remedy}"
        )
    return array


class TrainRows:
    """Training micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    It does not read ahead, because a row is only 32 KiB of a memory-mapped file.

    Args:
        mine: this replica's micro-batches.
        seed: seed of order and dropout.
        columns: positions in a row that belong to this rank; None for all.
        pin_memory: put the tensors in pinned memory.
    """

    def __init__(
        self, rows: PreparedRows, mine: MicroBatches, seed: int, columns: NDArray[np.int64] | None, pin_memory: bool
    ) -> None:
        self.train_samples, self.eval_samples = len(rows.train), len(rows.eval)
        self.synthetic = rows.synthetic
        self._rows, self._mine, self._seed = rows, mine, seed
        self._columns, self._pin_memory = columns, pin_memory
        shares = (mine.micro_batch, mine.accumulation, mine.replicas, mine.replica)
        self._stream = EpochStream(self.train_samples, *shares, seed)

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield ``block`` from position ``start``: ``tokens`` and ``labels`` (rows, columns), and ``dropout_seed``."""
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
        shard: this replica's rows; all replicas have equally many batches.
        columns: positions in a row that this rank reads; None for all.
        pin_memory: use pinned memory, for asynchronous copies to a GPU.
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
    facts: RowSizes,
    layout: Layout,
    micro_batch: int,
    accumulation: int = 1,
    seed: int | None = None,
    positions: Tensor | None = None,
) -> TrainRows:
    """Open the training data under ``root`` for this rank; allowed only after ``run_start``.

    Args:
        micro_batch: rows in a micro-batch of one replica.
        accumulation: micro-batches per step and replica.
        seed: seed of order and dropout; None for that of ``layout``.
        positions: int64, the positions in a row that belong to this rank, in its order; None for all.

    Raises:
        DataError: the folder is incomplete or damaged, or its rows are for another model.
    """
    mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    chosen = layout.seed if seed is None else seed
    return TrainRows(open_rows(root, facts), mine, chosen, _columns(positions), layout.device.type == "cuda")


def open_evaluation(
    root: Path, facts: RowSizes, layout: Layout, rows_per_batch: int = 1, positions: Tensor | None = None
) -> EvaluationRows:
    """Open this replica's contiguous part of the evaluation set under ``root``; allowed only after ``run_start``.

    Args:
        rows_per_batch: rows in every batch; the last batches are padded.

    Raises:
        DataError: see :func:`open_train`.
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
    """Return ``tokens`` and ``labels``, the next tokens, int32 (R, S); the last label of a row is ``NOT_SCORED``.

    Args:
        scored_RS: nonzero for tokens that are scored when they are the label; None scores all.
        columns: positions in a row, in the order of the result; None for all.
        pin_memory: use pinned memory, which allows asynchronous copies to a GPU.
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


def example(rows: int, facts: RowSizes, columns: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Return ``tokens``, ``labels`` and ``dropout_seed`` of rows of random tokens, scored but for their last label.

    Args:
        columns: number of columns of a row on one rank; None for all.
    """
    shape = (rows, facts.row_length if columns is None else columns)
    tokens_RS = np.random.default_rng(seed).integers(0, facts.vocabulary, shape, dtype=np.int32)
    return {**shifted(tokens_RS, None), "dropout_seed": torch.tensor(seed, dtype=torch.int64)}


def _columns(positions: Tensor | None) -> NDArray[np.int64] | None:
    return None if positions is None else positions.cpu().numpy()
