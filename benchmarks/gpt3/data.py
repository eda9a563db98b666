"""Read C4 and convert it to the tensors of a micro-batch, see :mod:`common.data.megatron.source`.

Rows do not overlap, so the last token of a row has no label. The training set has two halves, which take turns; their
rows are shuffled, but not their documents. The evaluation set is all rows of the validation subset in natural order,
including the shorter row at its end.
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
    """Return a shape whose rows have no label for their last token."""
    return RowShape(facts.row_length, facts.vocabulary, extra_token=False)


def open_train(
    root: Path, facts: RowFacts, layout: Layout, micro_batch: int, accumulation: int = 1, seed: int | None = None
) -> ThreadedTrainSource:
    """Open the training data under ``root`` for this rank; allowed only after ``run_start``.

    Args:
        micro_batch: rows in a micro-batch of one replica.
        accumulation: micro-batches per step and replica.
        seed: seed of the order; None for that of ``layout``.

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
    """Open this replica's contiguous part of the evaluation set under ``root``; allowed only after ``run_start``.

    Args:
        rows_per_batch: rows in every batch; the last batches are padded.

    Raises:
        DataError: see :func:`open_train`; or the numbers of rows or labels differ from ``facts``.
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
    """Return the number of labels in the first ``facts.eval_rows`` rows; the last row of a file may be shorter."""
    if len(rows) == facts.eval_rows:
        return rows.scored()
    return facts.eval_rows * (facts.row_length - 1)


def example(rows: int, facts: RowFacts, seed: int = 0) -> dict[str, Tensor]:
    """Return a synthetic training micro-batch, in host memory."""
    return source.example(rows, shape_of(facts), seed)
