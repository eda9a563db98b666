"""C4 to the tensors of a micro-batch: see :mod:`common.data.megatron.source`.

Rows do not overlap, so that the last token of one has no label. Those of the two halves of the training are shuffled,
not their documents, and taken in turn; the evaluation has all rows of the validation subset in their natural order, and
with them the tokens at its end that fill no row.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from benchmarks.gpt3.config import RowFacts
from benchmarks.gpt3.raw import CORPUS, EVAL, HALVES
from common.data.megatron import source
from common.data.megatron.preparation import read_manifest
from common.data.megatron.source import FileRows, RowShape, RowStream
from common.data.order import EvalShard, MicroBatches
from common.data.threads import ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout
from common.errors import DataError


def shape_of(facts: RowFacts) -> RowShape:
    """Rows without a label for their last token."""
    return RowShape(facts.row_length, facts.vocabulary, extra_token=False)


def open_train(
    root: Path, facts: RowFacts, layout: Layout, micro_batch: int, accumulation: int = 1, seed: int | None = None
) -> ThreadedTrainSource:
    """Open the training data under ``root`` for this rank; after ``run_start``.

    Args:
        root: prepared data.
        facts: what the rows have to be like, and which of them come first.
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
    halves, weights = [root / name for name in HALVES], [1.0 / len(HALVES)] * len(HALVES)
    rows = source.open_blend(halves, weights, shape, facts.index_rows, chosen, shuffle_documents=False)
    mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    stream = RowStream(mine, facts.index_rows, facts.consumed)
    return source.train_source(rows, shape, stream, facts.eval_tokens, found.stand_in, layout.device.type == "cuda")


def open_evaluation(root: Path, facts: RowFacts, layout: Layout, rows_per_batch: int = 1) -> ThreadedEvalSource:
    """Open this replica's contiguous part of the evaluation set under ``root``; after ``run_start``.

    Args:
        root, facts: see :func:`open_train`.
        layout: the replicas that share the set (axis dp), and the device.
        rows_per_batch: rows of every batch; the last ones are filled up.

    Raises:
        DataError: see there, or the set has other rows or labels than ``facts`` say.
    """
    read_manifest(root, CORPUS, facts.vocabulary)
    rows = source.open_in_order(root / EVAL, shape_of(facts), keep_partial=True)
    if len(rows) < facts.eval_rows:
        raise DataError(f"{root / EVAL}: {len(rows)} rows of {facts.row_length} where {facts.eval_rows} are evaluated")
    if (scored := labels_of(rows, facts)) != facts.eval_tokens:
        raise DataError(
            f"{root / EVAL}: {facts.eval_rows} rows have {scored:,} labels where {facts.eval_tokens:,} are evaluated: "
            "they are other documents, or of another tokenizer"
        )
    shard = EvalShard(facts.eval_rows, rows_per_batch, layout.size("dp"), layout.index("dp"))
    return source.eval_source(rows, shape_of(facts), shard, layout.device.type == "cuda")


def labels_of(rows: FileRows, facts: RowFacts) -> int:
    """Labels of the first ``facts.eval_rows`` of ``rows``; the last row of all may be a part of one."""
    if len(rows) == facts.eval_rows:
        return rows.scored()
    return facts.eval_rows * (facts.row_length - 1)


def example(rows: int, facts: RowFacts, seed: int = 0) -> dict[str, Tensor]:
    """A made-up training micro-batch, in host memory."""
    return source.example(rows, shape_of(facts), seed)
