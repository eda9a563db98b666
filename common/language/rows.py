"""Rows of tokens of a Megatron corpus for pre-training, see :mod:`common.data.megatron.source`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from common.data.megatron import source
from common.data.megatron.corpus import Corpus
from common.data.megatron.preparation import read_manifest
from common.data.megatron.source import FileRows, RowShape, RowStream
from common.data.order import EvalShard, MicroBatches
from common.data.threads import ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout
from common.errors import DataError


@dataclass(frozen=True)
class RowFacts:
    """Constants of the data that the reader needs.

    Attributes:
        vocabulary: exclusive upper bound of tokens.
        row_length: tokens per row, without the label of the last token.
        eval_rows: size of the evaluation set: the first rows in the order of the file.
        index_rows: number of training rows in the shuffled order. Another number gives another order.
        eval_tokens: number of labels in the evaluation set, if the rules count these; else None.
        consumed: number of training rows that an earlier training has used.
    """

    vocabulary: int
    row_length: int
    eval_rows: int
    index_rows: int
    eval_tokens: int | None = None
    consumed: int = 0


@dataclass(frozen=True)
class CorpusRows:
    """Rows of a prepared corpus.

    Attributes:
        corpus: the corpus in the manifest.
        train: names of the parts of the training set, which take turns; their rows are shuffled.
        eval: name of the evaluation set, whose rows are in natural order.
        extra_token: whether a row has a label for its last token, the first token of the next row. Otherwise rows do
            not overlap, and the evaluation set includes the shorter row at its end.
        shuffle_documents: whether the documents of the training set are shuffled, as in Megatron-Core.
    """

    corpus: Corpus
    train: Sequence[str]
    eval: str
    extra_token: bool
    shuffle_documents: bool

    def shape(self, facts: RowFacts) -> RowShape:
        """Return the shape of the rows."""
        return RowShape(facts.row_length, facts.vocabulary, self.extra_token)

    def open_train(
        self,
        root: Path,
        facts: RowFacts,
        layout: Layout,
        micro_batch: int,
        accumulation: int = 1,
        seed: int | None = None,
    ) -> ThreadedTrainSource:
        """Open the training data under ``root`` for this rank; allowed only after ``run_start``.

        Args:
            micro_batch: rows in a micro-batch of one replica.
            accumulation: micro-batches per step and replica.
            seed: seed of the order; None for that of ``layout``.

        Raises:
            DataError: the folder is incomplete or damaged, or its tokens are for another model.
        """
        found, shape = read_manifest(root, self.corpus, facts.vocabulary), self.shape(facts)
        chosen = layout.seed if seed is None else seed
        parts, weights = [root / name for name in self.train], [1.0 / len(self.train)] * len(self.train)
        rows = source.open_blend(parts, weights, shape, facts.index_rows, chosen, self.shuffle_documents)
        mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
        stream = RowStream(mine, facts.index_rows, facts.consumed)
        samples = facts.eval_rows if facts.eval_tokens is None else facts.eval_tokens
        return source.train_source(rows, shape, stream, samples, found.stand_in, layout.device.type == "cuda")

    def open_evaluation(
        self, root: Path, facts: RowFacts, layout: Layout, rows_per_batch: int = 1
    ) -> ThreadedEvalSource:
        """Open this replica's contiguous part of the evaluation set under ``root``; allowed only after ``run_start``.

        Args:
            rows_per_batch: rows in every batch; the last batches are padded.

        Raises:
            DataError: see :meth:`open_train`; or the numbers of rows or labels differ from ``facts``.
        """
        read_manifest(root, self.corpus, facts.vocabulary)
        path, shape = root / self.eval, self.shape(facts)
        rows = source.open_in_order(path, shape, keep_partial=not self.extra_token)
        if len(rows) < facts.eval_rows:
            raise DataError(f"{path}: {len(rows)} rows of {facts.row_length} where {facts.eval_rows} are evaluated")
        if facts.eval_tokens is not None and (scored := _labels(rows, facts)) != facts.eval_tokens:
            raise DataError(
                f"{path}: {facts.eval_rows} rows have {scored:,} labels where {facts.eval_tokens:,} are evaluated: "
                "they are other documents, or of another tokenizer"
            )
        shard = EvalShard(facts.eval_rows, rows_per_batch, layout.size("dp"), layout.index("dp"))
        return source.eval_source(rows, shape, shard, layout.device.type == "cuda")

    def example(self, rows: int, facts: RowFacts, seed: int = 0) -> dict[str, Tensor]:
        """Return a synthetic training micro-batch, in host memory."""
        return source.example(rows, self.shape(facts), seed)


def _labels(rows: FileRows, facts: RowFacts) -> int:
    """Return the number of labels in the first ``facts.eval_rows`` rows; the last row of a file may be shorter."""
    if len(rows) == facts.eval_rows:
        return rows.scored()
    return facts.eval_rows * (facts.row_length - 1)
