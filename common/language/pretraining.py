"""Pre-training of a decoder on rows of a Megatron corpus (:mod:`common.data.megatron.source`), and its metric."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from common.contract.evaluation import Predictions, Scorer
from common.data.batches import Batch, DataSource, EvalSource
from common.data.megatron import source
from common.data.megatron.corpus import Corpus
from common.data.megatron.preparation import read_manifest
from common.data.megatron.source import FileRows, RowShape, RowStream
from common.data.order import EvalShard, MicroBatches
from common.data.threads import ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout
from common.errors import DataError
from common.evaluation.counts import CountedEvaluation, Counts, check_whole_set
from common.language.stage import MeanOverLabels
from common.language.workload import LanguageModel
from common.optim.memory_plan import trained_weights


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
        return source.train_source(rows, shape, stream, samples, found.synthetic, layout.device.type == "cuda")

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
        """Return a synthetic training micro-batch in host memory: ``tokens``, int32 (rows, S + 1)."""
        return source.example(rows, self.shape(facts), seed)


def _labels(rows: FileRows, facts: RowFacts) -> int:
    """Return the number of labels in the first ``facts.eval_rows`` rows; the last row of a file may be shorter."""
    if len(rows) == facts.eval_rows:
        return rows.scored()
    return facts.eval_rows * (facts.row_length - 1)


class TokenMean(Scorer):
    """Log perplexity: the mean cross-entropy of all scored tokens, in nats. Rows with more of them have more weight.

    Args:
        samples: the count that the rules call samples: ``rows`` or ``tokens``.
    """

    def __init__(self, samples: str) -> None:
        self._samples = samples

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return ``log_perplexity``, the mean loss of a token, and ``eval_samples``, the number of rows or tokens."""
        values = predictions.values
        check_whole_set(values["rows"], values["expected"], "rows")
        return {"log_perplexity": values["loss"] / values["tokens"], "eval_samples": values[self._samples]}


class Pretraining(LanguageModel):
    """Pre-training on rows of tokens that are ``tokens`` (B, S + 1) of a batch, with -1 for padding."""

    rows: ClassVar[CorpusRows]
    """Rows of the prepared data."""

    @property
    @abstractmethod
    def row_facts(self) -> RowFacts:
        """Constants of the data that the reader needs."""

    def objective(self) -> MeanOverLabels:
        """Return the object that computes the mean loss over all labels of every micro-batch."""
        return MeanOverLabels(self.split, self.own.facts.row_length - (0 if self.rows.extra_token else 1))

    @property
    def rows_per_evaluation(self) -> int:
        """Evaluation rows that pass through the stages of pp together."""
        reader = self.own.reader
        return reader.eval_rows * getattr(reader, "eval_micro_batches", 1)

    def trained_sizes(self) -> dict[str, Any]:
        """Return the arguments of every :class:`common.language.memory.TrainedWorkspace`."""
        return {
            **self.sizes(),
            **trained_weights(self.cfg, self.layout, self.dtype),
            "chunk_graphs": self.cfg.chunk_graphs,
        }

    def example_batches(self) -> Iterable[Batch]:
        """Yield one synthetic micro-batch, because all training micro-batches have the same shape."""
        yield Batch(self.to_device(self._example(self.cfg.micro_batch)), self.nominal_samples)

    def _example(self, rows: int) -> dict[str, Tensor]:
        return {"tokens": self.rows.example(rows, self.row_facts)["tokens"]}

    def open_data(self, root: Path) -> DataSource:
        """Open the training rows; all ranks that share rows read them completely."""
        cfg = self.cfg
        return self.rows.open_train(root, self.row_facts, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps)

    def evaluation(self, layout: Layout) -> CountedEvaluation:
        """Return the evaluation of log perplexity on the ranks of ``layout``, with sums in float64."""
        rows = self.rows_per_evaluation
        inputs = self.to_device({**self._example(rows), "present": torch.ones(rows, dtype=torch.bool)})
        axes = tuple(axis for axis in ("pp", "dp", "cp") if axis in self.axes)
        counts = Counts(layout, ("rows", "tokens"), ("loss",), axes=axes)
        # All stages and all ranks of cp read every row, so only one of them counts rows.
        counts_rows = self.model.last and layout.coordinate("cp") == 0

        def count(batch: dict[str, Tensor]) -> None:
            present = batch["present"].sum() * counts_rows
            tokens, loss = torch.zeros_like(present), torch.zeros((), dtype=torch.float64, device=present.device)
            for losses_T, scored_T in self._scored_parts(batch):
                tokens, loss = tokens + scored_T.sum(), loss + losses_T.double().sum()
            counts.add(present, tokens, loss)

        def open_rows(root: Path) -> EvalSource:
            return self.rows.open_evaluation(root, self.row_facts, layout, rows)

        unit = "rows" if self.row_facts.eval_tokens is None else "tokens"
        capture, scorer = self.cfg.cuda_graphs, TokenMean(unit)
        return CountedEvaluation(scorer, self.model, count, counts, inputs, open_rows, capture, self.stage.evaluating)

    def _scored_parts(self, batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return losses (T,) and a mask of scored tokens of each micro-batch; on the last stage only. Collective."""
        parts = batch["tokens"].split(self.own.reader.eval_rows)
        return self.pipeline.forward(self.stage.scoring, [Batch({"tokens": part}, len(part)) for part in parts])
