"""C4 to the tensors of a micro-batch: see :mod:`common.data.megatron.source`.

Documents and rows of the training are shuffled as Megatron-Core does; the evaluation has the first rows of the
validation set in their natural order, as the rules have it.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from benchmarks.llama31_8b.config import RowFacts
from benchmarks.llama31_8b.raw import CORPUS, EVAL, TRAIN
from common.data.megatron import source
from common.data.megatron.preparation import read_manifest
from common.data.megatron.source import RowShape, RowStream
from common.data.order import EvalShard, MicroBatches
from common.data.threads import ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout
from common.errors import DataError


def shape_of(facts: RowFacts) -> RowShape:
    """Rows with a label for every token."""
    return RowShape(facts.row_length, facts.vocabulary, extra_token=True)


def open_train(
    root: Path, facts: RowFacts, layout: Layout, micro_batch: int, accumulation: int = 1, seed: int | None = None
) -> ThreadedTrainSource:
    """Open the training data under ``root`` for this rank; after ``run_start``.

    Args:
        root: prepared data.
        facts: what the rows have to be like.
        layout: the replica (axis dp), the device, and the seed.
        micro_batch: rows of a micro-batch of one replica.
        accumulation: micro-batches per step of a replica.
        seed: of the order; None for the layout's.

    Raises:
        DataError: the folder is incomplete or damaged, or its tokens are for another model.
    """
    found = read_manifest(root, CORPUS, facts.vocabulary)
    chosen = layout.seed if seed is None else seed
    shape = shape_of(facts)
    rows = source.open_blend([root / TRAIN], [1.0], shape, facts.index_rows, chosen, shuffle_documents=True)
    mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    stream = RowStream(mine, facts.index_rows)
    return source.train_source(rows, shape, stream, facts.eval_rows, found.stand_in, layout.device.type == "cuda")


def open_evaluation(root: Path, facts: RowFacts, layout: Layout, rows_per_batch: int = 1) -> ThreadedEvalSource:
    """Open this replica's contiguous part of the evaluation set under ``root``; after ``run_start``.

    Args:
        root, facts: see :func:`open_train`.
        layout: the replicas that share the set (axis dp), and the device.
        rows_per_batch: rows of every batch; the last ones are filled up.

    Raises:
        DataError: see there, or the set has fewer rows than ``facts`` say.
    """
    read_manifest(root, CORPUS, facts.vocabulary)
    rows = source.open_in_order(root / EVAL, shape_of(facts), keep_partial=False)
    if len(rows) < facts.eval_rows:
        raise DataError(f"{root / EVAL}: {len(rows)} rows of {facts.row_length} where {facts.eval_rows} are evaluated")
    shard = EvalShard(facts.eval_rows, rows_per_batch, layout.size("dp"), layout.index("dp"))
    return source.eval_source(rows, shape_of(facts), shard, layout.device.type == "cuda")


def example(rows: int, facts: RowFacts, seed: int = 0) -> dict[str, Tensor]:
    """A made-up training micro-batch, in host memory."""
    return source.example(rows, shape_of(facts), seed)
